# Proves that a Julia works, and says where it keeps what embedding it needs: one line of "name<tab>value" each.
# A Julia that stops on the way has told how far it came.

say(name, value) = (println(name, '\t', value); flush(stdout))

say("version", VERSION)
VERSION < v"1.5" && exit()

say("step", "load its standard library")
include(joinpath(@__DIR__, "runtime.jl"))

say("step", "throw and catch an exception")
(try
    sqrt(-1.0)
catch
    true
end)::Bool || error("an exception was not caught")

say("step", "throw and catch exceptions on $(Threads.nthreads()) threads")
TwinGradRuntime.catches() || error("exceptions were not caught")
say("threads", Threads.nthreads())

say("step", "multiply matrices")
say("blas", TwinGradRuntime.blas())
say("kernels", TwinGradRuntime.kernels())

say("step", "name its files")
say("bindir", Sys.BINDIR)
say("sysimage", unsafe_string(Base.JLOptions().image_file))
for library in TwinGradRuntime.Libdl.dllist()
    say("library", library)
end
say("step", "")
