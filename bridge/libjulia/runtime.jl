# What the bridge asks of a Julia before and beside the engine, in Julia 1.5 to 1.12 with the standard library only.
# Evaluated by every runtime when it starts, and by probe.jl. Comments, no docstrings: with PythonCall loaded, Julia compiles for
# half a second what enters those.

module TwinGradRuntime

import Libdl, LinearAlgebra

# The message of an exception, as Julia would show it, without the stack.
message(error) =
    try
        sprint(showerror, error)
    catch
        string(typeof(error))
    end

# The paths of the libraries that Julia's own BLAS calls reach. Others in this process, such as numpy's, don't count.
function blas_libraries()
    LinearAlgebra.mul!(zeros(Float32, 4, 4), ones(Float32, 4, 4), ones(Float32, 4, 4))  # a BLAS may be loaded on demand
    names = isdefined(LinearAlgebra.BLAS, :get_config) ?
        [basename(library.libname) for library in LinearAlgebra.BLAS.get_config().loaded_libs] :
        [basename(Base.libblas_name)]
    return filter(Libdl.dllist()) do path
        file = basename(path)
        any(name -> file == name || startswith(file, "$name."), names)
    end
end

function openblas_string(names...)
    for name in names, path in blas_libraries()
        address = Libdl.dlsym_e(Libdl.dlopen(path), name)
        address == C_NULL || return unsafe_string(ccall(address, Cstring, ()))
    end
    return ""
end

# The BLAS in use, with its version where it tells one.
function blas()
    config = openblas_string(:openblas_get_config64_, :openblas_get_config)
    isempty(config) || return join(split(config)[1:min(2, end)], " ")
    isdefined(LinearAlgebra.BLAS, :get_config) || return string(LinearAlgebra.BLAS.vendor())
    return join((basename(library.libname) for library in LinearAlgebra.BLAS.get_config().loaded_libs), ", ")
end

# The kernels that OpenBLAS chose for this CPU; empty for another BLAS.
kernels() = openblas_string(:openblas_get_corename64_, :openblas_get_corename)

# Whether exceptions can be thrown from compiled code and caught, through many frames and while others run.
function catches()
    @noinline deep(x, depth) = depth == 0 ? sqrt(x) : deep(x, depth - 1) + 1.0
    caught = Threads.Atomic{Int}(0)
    Threads.@threads for i in 1:64
        garbage = [zeros(Float32, 64, 64) for _ in 1:8]
        try
            deep(-Float64(length(garbage)), 20)
        catch error
            error isa DomainError && Threads.atomic_add!(caught, 1)
        end
    end
    GC.gc()
    return caught[] == 64
end

# A C-callable entry point, to prove that one can be called.
successor(x::Cint)::Cint = x + Cint(1)
successor_pointer() = @cfunction(successor, Cint, (Cint,))

end
