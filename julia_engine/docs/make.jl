# The docstrings as web pages, in docs/build:
#
#     julia --project=julia_engine/docs -e 'using Pkg; Pkg.instantiate()'
#     julia --project=julia_engine/docs julia_engine/docs/make.jl
#
# It fails where an exported name has a docstring that no page shows, or a page names one that is not there.

using Documenter
using TwinGrad

makedocs(;
    sitename="TwinGrad, the Julia engine",
    modules=[TwinGrad],
    checkdocs=:exports,
    remotes=nothing,
    build=isempty(ARGS) ? "build" : abspath(ARGS[1]),
    format=Documenter.HTML(; edit_link=nothing, repolink=nothing, prettyurls=false, inventory_version="",
        size_threshold=nothing, size_threshold_warn=nothing),
    pages=["TwinGrad" => "index.md", "Automatic differentiation" => "ad.md", "Neural networks" => "network.md",
        "Internals" => "internals.md"],
)
