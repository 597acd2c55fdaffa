# Evaluated in a Julia that writes a system image (--output-o): loads the engine from the folder TWINGRAD_ENGINE and
# trains the sessions of the file TWINGRAD_SESSIONS with it, so that what is compiled for them is kept. In Julia 1.5 to
# 1.12 with the standard library only.

# In this mode nothing has been initialised yet, neither Base nor the libraries of the image that this one is built on.
Base.reinit_stdio()
@eval(Sys, BINDIR = ccall(:jl_get_julia_bindir, Any, ())::String)
Base.init_depot_path()
Base.init_load_path()
if VERSION >= v"1.7"  # from there on, LinearAlgebra has no BLAS before this
    for name in ("CompilerSupportLibraries_jll", "OpenBLAS_jll", "libblastrampoline_jll", "LinearAlgebra")
        for (id, library) in Base.loaded_modules
            id.name == name && isdefined(library, :__init__) && Base.invokelatest(library.__init__)
        end
    end
end

# In a module without a name, which leaves nothing behind in Main.
@eval Module() begin
    pushfirst!(LOAD_PATH, ENV["TWINGRAD_ENGINE"])
    const TwinGrad = Base.require(Base.identify_package("TwinGrad"))
    const Entry, Kernels = TwinGrad.Entry, TwinGrad.AD.Kernels
    Kernels.VECTOR_BYTES[] = Kernels.find_vector_bytes()  # asked again whenever the image is loaded

    "Train for two steps, the second with a smaller batch, and do all else that a session can."
    function train(::Type{T}, text, parameters, rows, features, labels, targets, outputs) where {T}
        vector, gradient = fill(T(0.01), parameters), zeros(T, parameters)
        x, order, losses, out = ones(T, features * rows), collect(Int64, 0:rows-1), zeros(2), zeros(T, outputs * rows)
        y = labels ? zeros(Int64, targets * rows) : zeros(T, targets * rows)
        at(array) = Ptr{Cvoid}(pointer(array))
        GC.@preserve text vector gradient x y order losses out begin
            s = Entry.create(pointer(text), sizeof(text), at(vector), parameters)
            s > 0 || error(Entry.MESSAGE[])
            for status in (Entry.train(s, rows, at(x), at(y), rows, pointer(order), 1, 2, pointer(losses)),
                    Entry.evaluate(s, rows, at(x), at(y), pointer(losses)), Entry.predict(s, rows, at(x), at(out)),
                    Entry.gradients(s, rows, at(x), at(y), pointer(losses), at(gradient)))
                status == Entry.OK || error(Entry.MESSAGE[])
            end
            isempty(Entry.costs(s)) && error("a step without ops")
            Entry.free(s) == Entry.OK || error(Entry.MESSAGE[])
        end
        return nothing
    end

    for line in eachline(ENV["TWINGRAD_SESSIONS"])
        dtype, numbers, description = split(line, '\t'; limit=3)
        sizes = [parse(Int64, word) for word in split(numbers)]
        text = replace(description, '\t' => '\n')
        train(dtype == "float32" ? Float32 : Float64, text, sizes[1:3]..., sizes[4] == 1, sizes[5:6]...)
    end
    for name in names(Entry; all=true)
        occursin(r"^[a-z]+_pointer$", string(name)) && getfield(Entry, name)()
    end

    # What an image holds as the address of a kernel passes its argument in a box, which every call allocates. Functions
    # that nobody has called yet are not in the image: they find the addresses where it is used, in some milliseconds.
    for name in collect(keys(Kernels.KERNELS))
        kernel = Symbol(:run_, name)
        single, double = (Core.eval(Kernels, :(() -> @cfunction($kernel, Cvoid, (Ptr{Instruction{$T}},))))
                          for T in (Float32, Float64))
        Kernels.KERNELS[name] = Kernels.Kernel(kernel, single, double)
    end

    # As a new process finds it.
    Entry.COUNT[] = 0
    isempty(Entry.SESSIONS) || error("a session was left")
end
empty!(LOAD_PATH)
empty!(DEPOT_PATH)
