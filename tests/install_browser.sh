#!/usr/bin/env bash
# The browser that the HTML report is tested in, and the scripts that asv's pages need in it. Where there are none, root
# of a Debian system (a container, as in CI) gets their packages; nobody else's system is changed, and the tests say that
# they were skipped.
set -euo pipefail
missing=()
if [ -z "${TWINGRAD_BROWSER:-}" ] && ! command -v chromium chromium-browser google-chrome >/dev/null; then
  missing+=(chromium)
fi
if [ ! -d /usr/share/javascript/jquery-flot ]; then
  missing+=(libjs-jquery libjs-jquery-flot libjs-jquery-stupidtable libjs-bootstrap)
fi
if [ ${#missing[@]} = 0 ]; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing ${missing[*]} for the tests of the pages"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null && exit 0
fi
if [[ "${missing[*]}" != *chromium* ]]; then
  exit 0 # the pages of the benchmarks fetch their scripts from the web
fi
echo "No Chromium here: the HTML report is not tested in a browser. Install one, or name it in TWINGRAD_BROWSER."
