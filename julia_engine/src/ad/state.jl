# The state of the engine in each task: what is traced, what can be differentiated, in which layer.

"""
What the engine is doing in this task.

- `trace`: the ops made so far, where they are collected: of each its first result.
- `symbolic`: whether ops are made without values, as while a function is traced.
- `grad_enabled`: whether ops made now can be differentiated.
- `differentiating`: whether a function runs that a transform was given.
- `scope`: the layer whose ops are being made.
- `techniques`: those of the compiled function, for the tapes inside it.
- `reuse`: while the rule of a gradient runs: memory for its values.
- `mixed`: whether a dual number has met a tensor.
"""
mutable struct State
    trace::Union{Nothing,Vector{Tensor}}
    symbolic::Bool
    grad_enabled::Bool
    differentiating::Bool
    scope::String
    techniques::Techniques
    reuse::Union{Nothing,Reuse}
    mixed::Bool
end
new_state() = State(nothing, false, true, false, "", Techniques(), nothing, false)
state() = get!(new_state, task_local_storage(), :TwinGrad)::State

"""
    entering(f, field => value, ...)

Run `f()` with these fields of the state changed, and give them back what they were.
"""
function entering(@nospecialize(f), @nospecialize(changes...))
    now = state()
    before = Any[getfield(now, first(change)) for change in changes]
    try
        for (field, value) in changes
            setfield!(now, field, value)
        end
        return f()
    finally
        for (change, value) in zip(changes, before)
            setfield!(now, first(change), value)
        end
    end
end

"""
    scope(f, name)

Run `f()` and label the ops made inside with the layer `name`; nested scopes are joined by a slash.
"""
function scope(@nospecialize(f), name::AbstractString)
    outer = state().scope
    return entering(f, :scope => isempty(outer) ? String(name) : string(outer, "/", name))
end

"""
    no_grad(f)

Run `f()` without recording: results made inside cannot be differentiated, nor can dual numbers that it returns.
"""
no_grad(@nospecialize(f)) = without_duals(unrecorded(f))

"""`no_grad` of the engine's own, which says nothing about what the user's function means."""
unrecorded(@nospecialize(f)) = entering(f, :grad_enabled => false)
