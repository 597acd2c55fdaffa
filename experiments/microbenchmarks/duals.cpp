// Forward-mode gradients by dual numbers in C++: the baseline beside the Julia engine's forward mode.
//
//     g++ -O3 -march=native -std=c++17 duals.cpp -o duals
//     ./duals rosenbrock 12000 5 20
//
// Arguments: the function (rosenbrock or ackley), its input size, the chunk size (1 to 12; 0 is the function alone, on
// plain doubles) and the number of repetitions. Each repetition prints one JSON line with its seconds per gradient and
// the gradient's checksum, sum over i of (i mod 7 + 1) g[i], by which it can be compared with another engine's.
// Chunks: N partials at once, so ceil(n / N) passes over the function, as ForwardDiff and TwinGrad do it.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

template <int N>
struct Dual {
    double value;
    double partials[N];
    Dual() = default;
    Dual(double v) : value(v), partials{} {}
};

// y, and the partials of x times the derivative dy/dx.
template <int N>
inline Dual<N> chain(const Dual<N>& x, double y, double derivative) {
    Dual<N> r;
    r.value = y;
    for (int k = 0; k < N; ++k) r.partials[k] = derivative * x.partials[k];
    return r;
}

template <int N>
inline Dual<N> operator+(const Dual<N>& a, const Dual<N>& b) {
    Dual<N> r;
    r.value = a.value + b.value;
    for (int k = 0; k < N; ++k) r.partials[k] = a.partials[k] + b.partials[k];
    return r;
}
template <int N>
inline Dual<N>& operator+=(Dual<N>& a, const Dual<N>& b) {
    a.value += b.value;
    for (int k = 0; k < N; ++k) a.partials[k] += b.partials[k];
    return a;
}
template <int N>
inline Dual<N> operator-(const Dual<N>& a, const Dual<N>& b) {
    Dual<N> r;
    r.value = a.value - b.value;
    for (int k = 0; k < N; ++k) r.partials[k] = a.partials[k] - b.partials[k];
    return r;
}
template <int N>
inline Dual<N> operator*(const Dual<N>& a, const Dual<N>& b) {
    Dual<N> r;
    r.value = a.value * b.value;
    for (int k = 0; k < N; ++k) r.partials[k] = a.value * b.partials[k] + b.value * a.partials[k];
    return r;
}
template <int N>
inline Dual<N> operator+(const Dual<N>& a, double b) { return chain(a, a.value + b, 1.0); }
template <int N>
inline Dual<N> operator-(double a, const Dual<N>& b) { return chain(b, a - b.value, -1.0); }
template <int N>
inline Dual<N> operator*(double a, const Dual<N>& b) { return chain(b, a * b.value, a); }

inline double square(double x) { return x * x; }
template <int N>
inline Dual<N> square(const Dual<N>& x) { return chain(x, x.value * x.value, 2.0 * x.value); }
template <int N>
inline Dual<N> exp(const Dual<N>& x) {
    const double y = std::exp(x.value);
    return chain(x, y, y);
}
template <int N>
inline Dual<N> sqrt(const Dual<N>& x) {
    const double y = std::sqrt(x.value);
    return chain(x, y, 0.5 / y);
}
template <int N>
inline Dual<N> cos(const Dual<N>& x) { return chain(x, std::cos(x.value), -std::sin(x.value)); }

template <class T>
T rosenbrock(const std::vector<T>& x) {
    T result(0.0);
    for (std::size_t i = 0; i + 1 < x.size(); ++i) {
        result += 100.0 * square(x[i + 1] - square(x[i])) + square(1.0 - x[i]);
    }
    return result;
}

template <class T>
T ackley(const std::vector<T>& x) {
    using std::cos;
    using std::exp;
    using std::sqrt;
    const double share = 1.0 / static_cast<double>(x.size()), turn = 2.0 * M_PI;
    T squares(0.0), cosines(0.0);
    for (std::size_t i = 0; i < x.size(); ++i) {
        cosines += cos(turn * x[i]);
        squares += square(x[i]);
    }
    return (-20.0) * exp(-0.2 * sqrt(share * squares)) - exp(share * cosines) + (20.0 + M_E);
}

struct Rosenbrock {
    template <class T>
    T operator()(const std::vector<T>& x) const { return rosenbrock(x); }
};
struct Ackley {
    template <class T>
    T operator()(const std::vector<T>& x) const { return ackley(x); }
};

template <int N, class F>
void gradient(const F& f, const std::vector<double>& x, std::vector<Dual<N>>& seeded, std::vector<double>& g) {
    const int n = static_cast<int>(x.size());
    for (int i = 0; i < n; ++i) seeded[i] = Dual<N>(x[i]);
    for (int start = 0; start < n; start += N) {
        const int stop = std::min(start + N, n);
        for (int i = start; i < stop; ++i) seeded[i].partials[i - start] = 1.0;
        const Dual<N> y = f(seeded);
        for (int i = start; i < stop; ++i) {
            g[i] = y.partials[i - start];
            seeded[i].partials[i - start] = 0.0;
        }
    }
}

struct Job {
    std::string name;
    std::vector<double> x;
    int chunk;
    int repetitions;
};

template <class Run>
void timed(const Job& job, std::vector<double>& g, const Run& run) {
    if (job.chunk == 0 || job.x.size() < 2000) run();  // to warm up; gradients by many inputs are long enough
    for (int r = 0; r < job.repetitions; ++r) {
        const auto begin = std::chrono::steady_clock::now();
        run();
        const auto end = std::chrono::steady_clock::now();
        double checksum = 0.0;
        for (std::size_t i = 0; i < g.size(); ++i) checksum += static_cast<double>(i % 7 + 1) * g[i];
        std::printf("{\"function\": \"%s\", \"n\": %zu, \"chunk\": %d, \"seconds\": %.9g, \"checksum\": %.17g}\n",
                    job.name.c_str(), job.x.size(), job.chunk,
                    std::chrono::duration<double>(end - begin).count(), checksum);
    }
}

template <int N, class F>
bool chunked(const F& f, const Job& job) {
    if constexpr (N > 12) {
        return false;
    } else {
        if (job.chunk != N) return chunked<N + 1>(f, job);
        std::vector<Dual<N>> seeded(job.x.size());
        std::vector<double> g(job.x.size());
        timed(job, g, [&] { gradient<N>(f, job.x, seeded, g); });
        return true;
    }
}

template <class F>
bool measure(const F& f, const Job& job) {
    if (job.chunk != 0) return chunked<1>(f, job);
    std::vector<double> value(1);  // the function alone: its value is where gradients have their checksum
    volatile double sink = 0.0;
    timed(job, value, [&] { value[0] = sink = f(job.x); });
    return true;
}

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: %s rosenbrock|ackley SIZE CHUNK REPETITIONS\n", argv[0]);
        return 2;
    }
    Job job{argv[1], std::vector<double>(std::max(0, std::atoi(argv[2]))), std::atoi(argv[3]), std::atoi(argv[4])};
    // The same point for every engine: x[i] = 0.5 + 0.001 ((37 i) mod 1000), i from 0.
    for (std::size_t i = 0; i < job.x.size(); ++i) job.x[i] = 0.5 + 0.001 * static_cast<double>((37 * i) % 1000);
    bool known = false;
    if (job.x.size() >= 2 && job.repetitions >= 1 && job.name == "rosenbrock") known = measure(Rosenbrock{}, job);
    if (job.x.size() >= 2 && job.repetitions >= 1 && job.name == "ackley") known = measure(Ackley{}, job);
    if (!known) {
        std::fprintf(stderr, "%s: expected rosenbrock or ackley, a size of 2 or more, a chunk of 0 to 12 and 1 or more "
                             "repetitions, got %s %s %s %s\n", argv[0], argv[1], argv[2], argv[3], argv[4]);
        return 2;
    }
    return 0;
}
