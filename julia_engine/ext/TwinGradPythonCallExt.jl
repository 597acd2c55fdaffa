"""
The engine in the Julia of a Python program. PythonCall has methods of Base's comparisons and conversions, with which much of
the engine's code that was compiled without them is no longer valid; here it is compiled with them, once and not in each process.
"""
module TwinGradPythonCallExt

using PythonCall: PythonCall
using TwinGrad: TwinGrad

TwinGrad.Versions.writes_code() && TwinGrad.Versions.keeping(TwinGrad.precompile_sessions)

end
