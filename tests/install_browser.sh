#!/usr/bin/env bash
# The browser that the HTML report is tested in. Where there is none, root of a Debian system (a container, as in CI)
# gets its package; nobody else's system is changed, and the tests say that they were skipped.
set -euo pipefail
if [ -n "${TWINGRAD_BROWSER:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing Chromium for the tests of the HTML report"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "No Chromium here: the HTML report is not tested in a browser. Install one, or name it in TWINGRAD_BROWSER."
