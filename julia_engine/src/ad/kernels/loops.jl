# Elementwise loops. The innermost one is specialised for rows without gaps and for operands that repeat.

@inline function unary!(f::F, x::Instruction{T}) where {F,T}
    n, so, sa = x.n[1], x.so[1], x.sa[1]
    @rows x begin
        if so == 1 && sa == 1
            @fast for i in 1:n
                unsafe_store!(o, f(unsafe_load(a, i)), i)
            end
        elseif sa == 0
            v = f(unsafe_load(a))
            @fast for i in 1:n
                put!(o, v, i, so)
            end
        else
            @fast for i in 1:n
                put!(o, f(at(a, i, sa)), i, so)
            end
        end
    end
end

"""`fast` where every element of a row is at most `TURNS` in size, else `slow`, element by element."""
@inline function guarded!(fast::F, slow::G, x::Instruction{T}) where {F,G,T}
    n, so, sa = x.n[1], x.so[1], x.sa[1]
    @rows x begin
        outside = false
        for i in 1:n
            outside |= !(abs(at(a, i, sa)) <= T(TURNS))
        end
        if outside
            for i in 1:n
                v = at(a, i, sa)
                put!(o, abs(v) <= T(TURNS) ? fast(v) : slow(v), i, so)
            end
        elseif so == 1 && sa == 1
            @fast for i in 1:n
                unsafe_store!(o, fast(unsafe_load(a, i)), i)
            end
        else
            @fast for i in 1:n
                put!(o, fast(at(a, i, sa)), i, so)
            end
        end
    end
end

@inline function binary!(f::F, x::Instruction{T}) where {F,T}
    n, so, sa, sb = x.n[1], x.so[1], x.sa[1], x.sb[1]
    @rows x begin
        if so == 1 && sa == 1 && sb == 1
            @fast for i in 1:n
                unsafe_store!(o, f(unsafe_load(a, i), unsafe_load(b, i)), i)
            end
        elseif so == 1 && sa == 1 && sb == 0
            v = unsafe_load(b)
            @fast for i in 1:n
                unsafe_store!(o, f(unsafe_load(a, i), v), i)
            end
        elseif so == 1 && sa == 0 && sb == 1
            v = unsafe_load(a)
            @fast for i in 1:n
                unsafe_store!(o, f(v, unsafe_load(b, i)), i)
            end
        else
            @fast for i in 1:n
                put!(o, f(at(a, i, sa), at(b, i, sb)), i, so)
            end
        end
    end
end

@inline function ternary!(f::F, x::Instruction{T}) where {F,T}
    n, so, sa, sb, sc = x.n[1], x.so[1], x.sa[1], x.sb[1], x.sc[1]
    @rows x begin
        if so == 1 && sa == 1 && sb == 1 && sc == 1
            @fast for i in 1:n
                unsafe_store!(o, f(unsafe_load(a, i), unsafe_load(b, i), unsafe_load(c, i)), i)
            end
        elseif so == 1 && sa == 1 && sb == 0 && sc == 0
            v, w = unsafe_load(b), unsafe_load(c)
            @fast for i in 1:n
                unsafe_store!(o, f(unsafe_load(a, i), v, w), i)
            end
        else
            @fast for i in 1:n
                put!(o, f(at(a, i, sa), at(b, i, sb), at(c, i, sc)), i, so)
            end
        end
    end
end

@inline function fill!(x::Instruction{T}) where {T}
    n, so, v = x.n[1], x.so[1], T(x.f[1])
    @rows x begin
        @fast for i in 1:n
            put!(o, v, i, so)
        end
    end
end

"""x to a whole power, by multiplication; the power is a number of the program."""
@inline function whole_power!(x::Instruction{T}) where {T}
    p = x.i[1]
    if p == 3
        unary!(v -> v * v * v, x)
    elseif p == 4
        unary!(v -> square(v * v), x)
    else
        unary!(v -> v * square(v * v), x)
    end
end

"""Conversions; an operand of another type has its strides counted in its own elements."""
@inline function convert!(::Type{To}, ::Type{From}, x::Instruction{T}) where {To,From,T}
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1, j in 0:x.n[2]-1
        o = Ptr{To}(x.out) + sizeof(To) * (j * x.so[2] + k * x.so[3] + l * x.so[4])
        a = Ptr{From}(x.a) + sizeof(From) * (j * x.sa[2] + k * x.sa[3] + l * x.sa[4])
        for i in 1:x.n[1]
            put!(o, converted(To, at(a, i, x.sa[1])), i, x.so[1])
        end
    end
end
@inline converted(::Type{To}, v) where {To} = To(v)

"""Conversions to integers, towards zero; throws where there is a number that has none."""
@inline function to_int!(x::Instruction{T}) where {T}
    limit = T(0x1p63)
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1, j in 0:x.n[2]-1
        o = Ptr{Int64}(x.out) + sizeof(Int64) * (j * x.so[2] + k * x.so[3] + l * x.so[4])
        a = x.a + sizeof(T) * (j * x.sa[2] + k * x.sa[3] + l * x.sa[4])
        all_fit = true
        for i in 1:x.n[1]
            v = at(a, i, x.sa[1])
            fits = -limit <= v < limit
            all_fit &= fits
            put!(o, unsafe_trunc(Int64, ifelse(fits, v, zero(T))), i, x.so[1])
        end
        all_fit || throw_unfit(x, a)
    end
end

@noinline function throw_unfit(x::Instruction{T}, a) where {T}
    limit = T(0x1p63)
    i = findfirst(i -> !(-limit <= at(a, i, x.sa[1]) < limit), 1:x.n[1])
    throw(DTypeError("$(named(place_of(x))): $(at(a, i, x.sa[1])) is no Int64; only finite numbers from -2^63 to " *
        "below 2^63 can be converted"))
end

# Reductions. The result's strides are 0 along the reduced axes; it holds the neutral element before the first row.

const BLOCK = 2048  # elements added in the elements' own precision; the sums of blocks are added in Float64

"""The sum of a row, in Float64."""
@inline function row_sum(a::Ptr{T}, n, sa) where {T}
    total = 0.0
    start = 0
    while start < n
        stop = min(start + BLOCK, n)
        s = zero(T)
        if sa == 1
            @summing for i in start+1:stop
                s += unsafe_load(a, i)
            end
        else
            @summing for i in start+1:stop
                s += at(a, i, sa)
            end
        end
        total += Float64(s)
        start = stop
    end
    return total
end

@inline function sum!(x::Instruction{T}) where {T}
    n, so, sa = x.n[1], x.so[1], x.sa[1]
    if so == 0
        sum_rows!(x)
    elseif so == 1 && sa == 1 && x.so[2] == 0 && x.n[2] >= 4
        sum_columns!(x)
    else
        @rows x begin
            @fast for i in 1:n
                put!(o, at(o, i, so) + at(a, i, sa), i, so)
            end
        end
    end
    return nothing
end

"""Add each row to an element of the result; rows that follow each other and belong to one element are added in Float64."""
@inline function sum_rows!(x::Instruction{T}) where {T}
    o, total = x.out, 0.0
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1, j in 0:x.n[2]-1
        here = moved(x.out, x.so, j, k, l)
        if here != o
            unsafe_store!(o, T(Float64(unsafe_load(o)) + total))
            o, total = here, 0.0
        end
        total += row_sum(moved(x.a, x.sa, j, k, l), x.n[1], x.sa[1])
    end
    unsafe_store!(o, T(Float64(unsafe_load(o)) + total))
    return nothing
end

"""Add columns to the result eight at a time, so that it is read and written less often."""
@inline function sum_columns!(x::Instruction{T}) where {T}
    n, columns, s, bytes = x.n[1], x.n[2], x.sa[2], sizeof(T)
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1
        o = x.out + bytes * (k * x.so[3] + l * x.so[4])
        a = x.a + bytes * (k * x.sa[3] + l * x.sa[4])
        j = 0
        while j + 8 <= columns
            @fast for i in 1:n
                v = (unsafe_load(a, i) + unsafe_load(a, i + s)) + (unsafe_load(a, i + 2s) + unsafe_load(a, i + 3s))
                w = (unsafe_load(a, i + 4s) + unsafe_load(a, i + 5s)) + (unsafe_load(a, i + 6s) + unsafe_load(a, i + 7s))
                unsafe_store!(o, unsafe_load(o, i) + (v + w), i)
            end
            a += 8 * bytes * s
            j += 8
        end
        while j < columns
            @fast for i in 1:n
                unsafe_store!(o, unsafe_load(o, i) + unsafe_load(a, i), i)
            end
            a += bytes * s
            j += 1
        end
    end
end

@inline function extremum!(f::F, x::Instruction{T}) where {F,T}
    n, so, sa = x.n[1], x.so[1], x.sa[1]
    @rows x begin
        if so == 0
            unsafe_store!(o, row_extremum(f, unsafe_load(o), a, n, sa))
        else
            @fast for i in 1:n
                put!(o, f(at(o, i, so), at(a, i, sa)), i, so)
            end
        end
    end
end

@inline function row_extremum(f::F, first::T, a::Ptr{T}, n, sa) where {F,T}
    v, w, y, z = first, first, first, first  # four chains, because each comparison waits for the one before
    i = 1
    while i + 3 <= n
        v = f(v, at(a, i, sa))
        w = f(w, at(a, i + 1, sa))
        y = f(y, at(a, i + 2, sa))
        z = f(z, at(a, i + 3, sa))
        i += 4
    end
    while i <= n
        v = f(v, at(a, i, sa))
        i += 1
    end
    return f(f(v, w), f(y, z))
end

@inline function prod!(x::Instruction{T}) where {T}
    n, so, sa = x.n[1], x.so[1], x.sa[1]
    @rows x begin
        if so == 0
            unsafe_store!(o, row_product(unsafe_load(o), a, n, sa))
        else
            @fast for i in 1:n
                put!(o, at(o, i, so) * at(a, i, sa), i, so)
            end
        end
    end
end

@inline function row_product(total::T, a::Ptr{T}, n, sa) where {T}
    for i in 1:n
        total *= at(a, i, sa)
    end
    return total
end

"""b, of Int64, = the first position, from 1, of the largest (or smallest) element of a; of the first NaN if there is one."""
@inline function position!(is_worse::F, x::Instruction{T}) where {F,T}
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1
        a = x.a + sizeof(T) * (k * x.sa[3] + l * x.sa[4])
        best, place = unsafe_load(a), 1
        for j in 0:x.n[2]-1, i in 1:x.n[1]
            v = at(a + sizeof(T) * j * x.sa[2], i, x.sa[1])
            if best == best && (v != v || is_worse(best, v))
                best, place = v, j * x.n[1] + i
            end
        end
        unsafe_store!(Ptr{Int64}(x.b) + sizeof(Int64) * (k * x.sb[3] + l * x.sb[4]), place)
    end
end
isgreater_(a, b) = isless(b, a)

# Exponential kin. Loops 1 and 2 run over the reduced axes, 3 and 4 over the others.

@inline function column_sum(x::Instruction{T}, p::Ptr{T}, s) where {T}
    total = 0.0
    for j in 0:x.n[2]-1
        total += row_sum(p + sizeof(T) * j * s[2], x.n[1], s[1])
    end
    return T(total)
end

@inline function column_extremum(f::F, x::Instruction{T}, first::T, p::Ptr{T}, s) where {F,T}
    for j in 0:x.n[2]-1
        first = row_extremum(f, first, p + sizeof(T) * j * s[2], x.n[1], s[1])
    end
    return first
end

@inline function each_in_column!(f::F, x::Instruction{T}, o::Ptr{T}, a::Ptr{T}) where {F,T}
    for j in 0:x.n[2]-1
        p, q = o + sizeof(T) * j * x.so[2], a + sizeof(T) * j * x.sa[2]
        @fast for i in 1:x.n[1]
            put!(p, f(at(q, i, x.sa[1])), i, x.so[1])
        end
    end
end

"""out = a - its largest element, which goes to b: exp() of the difference is in range.

An infinite largest element is replaced by the largest number there is: infinity - infinity would be NaN."""
@inline function shift!(x::Instruction{T}) where {T}
    @columns x begin
        largest = clamped(column_extremum(larger, x, T(-Inf), a, x.sa), -floatmax(T), floatmax(T))
        unsafe_store!(b, largest)
        each_in_column!(v -> v - largest, x, o, a)
    end
end

"""out = out / sum of out."""
@inline function normalise!(x::Instruction{T}) where {T}
    @columns x begin
        total = column_sum(x, a, x.sa)
        each_in_column!(v -> v / total, x, o, a)
    end
end

"""b = b + log(sum of a)."""
@inline function add_log_sum!(x::Instruction{T}) where {T}
    @columns x begin
        unsafe_store!(b, unsafe_load(b) + fast_log(column_sum(x, a, x.sa)))
    end
end

"""out = out - log(sum of a)."""
@inline function subtract_log_sum!(x::Instruction{T}) where {T}
    @columns x begin
        total = fast_log(column_sum(x, a, x.sa))
        each_in_column!(v -> v - total, x, o, o, x.so)
    end
end

@inline function each_in_column!(f::F, x::Instruction{T}, o::Ptr{T}, a::Ptr{T}, s) where {F,T}
    for j in 0:x.n[2]-1
        p, q = o + sizeof(T) * j * x.so[2], a + sizeof(T) * j * s[2]
        @fast for i in 1:x.n[1]
            put!(p, f(at(q, i, s[1])), i, x.so[1])
        end
    end
end

"""b = Euclidean norm of a, scaled by the largest element: squares neither overflow nor vanish."""
@inline function norm!(x::Instruction{T}) where {T}
    @columns x begin
        scale = column_extremum((m, v) -> larger(m, abs(v)), x, zero(T), a, x.sa)
        if scale == 0 || !isfinite(scale)
            unsafe_store!(b, scale)
        else
            total = 0.0
            for j in 0:x.n[2]-1, i in 1:x.n[1]
                total += abs2(Float64(at(a + sizeof(T) * j * x.sa[2], i, x.sa[1]) / scale))
            end
            unsafe_store!(b, T(sqrt(total)) * scale)
        end
    end
end

# Softmax cross-entropy: a is the logits (classes, n), b their logsumexp (n), index the labels, from 1.

@inline function cross_entropy!(x::Instruction{T}) where {T}
    classes, n = x.n[1], x.n[2]
    total = 0.0
    for i in 1:n
        label = unsafe_load(x.index, i)
        1 <= label <= classes || throw_label(x, label, i, classes)
        total += Float64(unsafe_load(x.b, i) - unsafe_load(x.a, (i - 1) * classes + label))
    end
    unsafe_store!(x.out, T(total / n))  # the mean of nothing is NaN
    return nothing
end

"""out = (out - one_hot(labels)) g / n, where out holds the softmax and c holds g."""
@inline function cross_entropy_gradient!(x::Instruction{T}) where {T}
    classes, n = x.n[1], x.n[2]
    scale = unsafe_load(x.c) / max(n, 1)
    for i in 1:n
        label = unsafe_load(x.index, i)
        1 <= label <= classes || throw_label(x, label, i, classes)
        at_label = (i - 1) * classes + label
        unsafe_store!(x.out, unsafe_load(x.out, at_label) - one(T), at_label)
    end
    @fast for i in 1:classes*n
        unsafe_store!(x.out, unsafe_load(x.out, i) * scale, i)
    end
    return nothing
end

# What an instruction checks names the op's place in the model: an object whose address is its last number.

"""What a message says of an instruction whose integers are checked: the op, the layer, and the size of the integers' array."""
mutable struct Place
    op::String
    layer::String
    dims::Vector{Int}
end

place_of(x::Instruction) = unsafe_pointer_to_objref(Ptr{Cvoid}(x.i[4]))::Place
named(place::Place) = isempty(place.layer) ? place.op : "$(place.op) in layer \"$(place.layer)\""
"""Where the `j`-th of the integers is: one number, or one for each axis."""
function position_of(place::Place, j::Int)
    length(place.dims) < 2 && return string(j)
    at = Tuple(CartesianIndices(Tuple(place.dims))[j])
    return string("(", join(at, ", "), ")")
end

@noinline function throw_label(x, label, i, classes)
    place = place_of(x)
    throw(LabelError("$(named(place)): label $label of sample $(position_of(place, i)) is not one of the $classes classes " *
        "1:$classes"))
end

# Indexing: memory without gaps, seen as (before, axis, after); the index runs over the axis.

@inline function gather!(x::Instruction{T}) where {T}
    before, count, after, axis = x.n[1], x.n[2], x.n[3], x.i[1]
    for k in 0:after-1, j in 1:count
        at_axis = unsafe_load(x.index, j)
        1 <= at_axis <= axis || throw_index(x, at_axis, j, axis)
        a = x.a + sizeof(T) * before * (at_axis - 1 + k * axis)
        o = x.out + sizeof(T) * before * (j - 1 + k * count)
        @fast for i in 1:before
            unsafe_store!(o, unsafe_load(a, i), i)
        end
    end
    return nothing
end

@inline function scatter!(x::Instruction{T}) where {T}
    before, count, after, axis = x.n[1], x.n[2], x.n[3], x.i[1]
    @fast for i in 1:before*axis*after
        unsafe_store!(x.out, zero(T), i)
    end
    for k in 0:after-1, j in 1:count
        at_axis = unsafe_load(x.index, j)
        1 <= at_axis <= axis || throw_index(x, at_axis, j, axis)
        o = x.out + sizeof(T) * before * (at_axis - 1 + k * axis)
        a = x.a + sizeof(T) * before * (j - 1 + k * count)
        @fast for i in 1:before
            unsafe_store!(o, unsafe_load(o, i) + unsafe_load(a, i), i)
        end
    end
    return nothing
end

# Embeddings: columns of a matrix by their numbers; that of number i[2] is left out, 0 for none.

@inline function embedding!(x::Instruction{T}) where {T}
    height, count, vocabulary, left_out = x.n[1], x.n[2], x.i[1], x.i[2]
    for j in 1:count
        id = unsafe_load(x.index, j)
        1 <= id <= vocabulary || throw_id(x, id, j, vocabulary)
        a, o = x.a + sizeof(T) * height * (id - 1), x.out + sizeof(T) * height * (j - 1)
        if id == left_out
            @fast for i in 1:height
                unsafe_store!(o, zero(T), i)
            end
        else
            @fast for i in 1:height
                unsafe_store!(o, unsafe_load(a, i), i)
            end
        end
    end
    return nothing
end

@inline function embedding_gradient!(x::Instruction{T}) where {T}
    height, count, vocabulary, left_out = x.n[1], x.n[2], x.i[1], x.i[2]
    @fast for i in 1:height*vocabulary
        unsafe_store!(x.out, zero(T), i)
    end
    for j in 1:count
        id = unsafe_load(x.index, j)
        1 <= id <= vocabulary || throw_id(x, id, j, vocabulary)
        id == left_out && continue
        a, o = x.a + sizeof(T) * height * (j - 1), x.out + sizeof(T) * height * (id - 1)
        @fast for i in 1:height
            unsafe_store!(o, unsafe_load(o, i) + unsafe_load(a, i), i)
        end
    end
    return nothing
end

@noinline function throw_id(x, id, j, n)
    place = place_of(x)
    at = isempty(place.dims) ? () : Tuple(CartesianIndices(Tuple(place.dims))[j])
    sample = isempty(at) ? "" : " in sample $(at[end])"
    length(at) > 1 && (sample *= " at position $(join(reverse(at[1:end-1]), ", "))")
    throw(ShapeError("$(named(place)): token id $id$sample is not one of the $n of the vocabulary, 1 to $n"))
end

@noinline function throw_index(x, i, j, n)
    place = place_of(x)
    throw(ShapeError("$(named(place)): index $i at position $(position_of(place, j)) is out of range for an axis of length $n"))
end

# Random masks: a counter-based generator (splitmix64), whose key and counter are the two words of `index`.

@inline function dropout_mask!(x::Instruction{T}) where {T}
    key, counter = unsafe_load(x.index, 1), unsafe_load(x.index, 2)
    n, rate, kept = x.n[1], x.f[1], T(1 / (1 - x.f[1]))
    @fast for i in 1:n
        unsafe_store!(x.out, ifelse(uniform(key, counter + i) >= rate, kept, zero(T)), i)
    end
    unsafe_store!(x.index, counter + n, 2)
    return nothing
end

"""A number in [0, 1) for every key and counter."""
@inline function uniform(key::Int64, counter::Int64)
    z = reinterpret(UInt64, key) + reinterpret(UInt64, counter) * 0x9e3779b97f4a7c15
    z = (z ⊻ (z >> 30)) * 0xbf58476d1ce4e5b9
    z = (z ⊻ (z >> 27)) * 0x94d049bb133111eb
    z = z ⊻ (z >> 31)
    return reinterpret(Float64, (z >> 12) | 0x3ff0000000000000) - 1.0
end

"""
    copy_columns!(out, x, rows, first=1, count=length(rows))

Copy samples into a batch: the columns `rows[first]` ... of `x`, an array whose last axis holds the samples, into the
columns of `out`. Allocates nothing. Throws a `ShapeError` for a sample that is not there.
"""
function copy_columns!(out::Array{T}, x::DenseArray{T}, rows::Vector{Int64}, first::Int=1, count::Int=length(rows)) where {T}
    samples = size(x, ndims(x))
    height = samples == 0 ? 0 : length(x) ÷ samples
    1 <= first && first + count - 1 <= length(rows) && height * count <= length(out) ||
        throw(ShapeError("copy_columns!: $count samples of $height elements do not fit"))
    GC.@preserve out x rows begin
        from, to = pointer(x), pointer(out)
        for i in 1:count
            row = unsafe_load(pointer(rows), first + i - 1)
            1 <= row <= samples || throw(ShapeError(
                "copy_columns!: sample $row at position $(first + i - 1) is not one of the $samples samples"))
            a, o = from + sizeof(T) * height * (row - 1), to + sizeof(T) * height * (i - 1)
            @fast for j in 1:height
                unsafe_store!(o, unsafe_load(a, j), j)
            end
        end
    end
    return out
end
