"""GradBench's modules on both engines: the tool's side of its protocol (gradben.ch), one file per module and engine.

A module `name` is `name.py`, for the numpy engine, and `name.jl`, its twin for the Julia engine. The Python file has

- `read(given)`: the arrays of an evaluation's input, and what is no array, from JSON;
- `FUNCTIONS`: for each function of the module what computes it from arrays, to be traced, given what is no array;
- `write(result, given)`: the output as JSON, where it is not the one result as a number or lists.

The Julia file ends with the same functions as a named tuple, of arrays whose axes are the other way round.
"""
