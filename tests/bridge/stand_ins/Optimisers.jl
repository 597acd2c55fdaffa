# A stand-in for Optimisers: what bridge/adapters/lux.jl asks of it, in plain Julia.
module Optimisers

include("parts.jl")

mutable struct Leaf
    rule::Rule
    state::Dict{Int,Any}
    frozen::Bool
end

setup(rule, tree::NamedTuple) = map(part -> setup(rule, part), tree)
setup(rule, ::NamedTuple{()}) = ()
setup(rule, array::AbstractArray) = Leaf(rule, Dict{Int,Any}(), false)

freeze!(leaf::Leaf) = (leaf.frozen = true; nothing)

update!(tree::NamedTuple, arrays, gradients) = foreach(n -> update!(tree[n], arrays[n], gradients[n]), keys(tree))
update!(_, _, ::Nothing) = nothing
update!(leaf::Leaf, array, gradient) = leaf.frozen || (array .-= leaf.rule.change(leaf.state, gradient))

end
