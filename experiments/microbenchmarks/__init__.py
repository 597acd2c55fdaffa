"""Micro-benchmarks of systems for automatic differentiation: small functions, each alone and with its gradient.

    functions.py     the functions, their inputs, and their derivatives by hand, which all others are checked against
    registry.py      the systems: which there are, and which of them this machine has
    systems/         a program for each system: the functions as its own best user would write them
    process.py       a system's program in its own process, and the lines of JSON it is spoken to with
    measure.py       rounds in which the systems alternate
    sweep.py         what is measured, and its records in the results folder
    duals.cpp        dual numbers in C++, the baseline of forward mode

A system more is a row in registry.py and a file in systems/, where serve.py and serve.jl know how to answer.
"""
