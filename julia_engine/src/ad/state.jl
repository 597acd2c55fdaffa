# The state of the engine in each task: what is traced, what can be differentiated, in which layer.

const Given = Vector{Pair{Tensor,UInt64}}

"""
What the engine is doing in this task.

- `trace`: the ops made so far, where they are collected: of each its first result.
- `given`: while ops are collected, the arrays that they were given, with their checksums then.
- `symbolic`: whether ops are made without values, as while a function is traced.
- `grad_enabled`: whether ops made now can be differentiated.
- `differentiating`: whether a function runs that a transform was given.
- `scope`: the layer whose ops are being made.
- `techniques`: those of the compiled function, for the tapes inside it.
- `winograd`: whether convolutions may be computed by Winograd's algorithm: while the tape of a training step is made.
- `reuse`: while the rule of a gradient runs: memory for its values.
- `mixed`: whether a dual number has ever met a tensor; else none is looked for.
- `code`: a list for the instructions of the next op, unless one is being computed.
"""
mutable struct State
    trace::Union{Nothing,Vector{Tensor}}
    given::Union{Nothing,Given}
    symbolic::Bool
    grad_enabled::Bool
    differentiating::Bool
    scope::String
    techniques::Techniques
    winograd::Bool
    reuse::Union{Nothing,Reuse}
    mixed::Bool
    code::Union{Nothing,Instructions}
end
new_state() = State(nothing, nothing, false, true, false, "", Techniques(), false, nothing, false, nothing)
state() = get!(new_state, task_local_storage(), :TwinGrad)::State

"""
    @entering field=value ... expression

Evaluate the expression with these fields of the state changed, and restore them. A macro, since a function would need a
closure, and Julia would compile that anew for each function that a transform receives.
"""
macro entering(arguments...)
    changes, expression = arguments[1:end-1], esc(arguments[end])
    fields = Symbol[change.args[1] for change in changes]
    now, before = gensym("now"), Symbol[gensym(field) for field in fields]
    keep = [:($kept = $now.$field) for (kept, field) in zip(before, fields)]
    change = [:($now.$field = $(esc(change.args[2]))) for (field, change) in zip(fields, changes)]
    restore = [:($now.$field = $kept) for (kept, field) in zip(before, fields)]
    return quote
        $now = state()
        $(keep...)
        try
            $(change...)
            $expression
        finally
            $(restore...)
        end
    end
end

"""
    scope(f, name)

Run `f()` and label the ops made inside with the layer `name`; nested scopes are joined by a slash.
"""
function scope(@nospecialize(f), name::AbstractString)
    outer = state().scope
    return @entering scope=(isempty(outer) ? String(name) : string(outer, "/", name)) f()
end

"""
    no_grad(f)

Run `f()` without building a graph: results made inside cannot be differentiated, nor can dual numbers that it returns.
"""
no_grad(@nospecialize(f)) = without_duals(without_grad(f))

"""`no_grad` of the engine's own, which says nothing about what the user's function means."""
without_grad(@nospecialize(f)) = @entering grad_enabled=false f()
