# GradBench's `hello`: a square, and its derivative.
square() = x -> x * x
double() = grad(square())
(square=square, double=double)
