"""A program for each system: the functions as its own best user would write them. See serve.py and serve.jl."""
