// What program.py writes, item by item, each checked as it is read. Raises Error.
#pragma once

#include <string>

#include "model.h"

namespace tk {

constexpr int64_t LIMIT = int64_t(1) << 31;

class Parser {
public:
    Parser(const int64_t* ints, int64_t ni, const double* floats, int64_t nf, const TensorRecord* tensors, int64_t nt)
        : ints_(ints), floats_(floats), tensors_(tensors), ni_(ni), nf_(nf), nt_(nt) {}

    int64_t integer(const char* what, int64_t low, int64_t high) {
        if (i_ >= ni_) throw Error(std::string("program: ends before ") + what);
        const int64_t v = ints_[i_++];
        if (v < low || v > high)
            throw Error(std::string("program: ") + what + ": expected " + std::to_string(low) + " to " +
                        std::to_string(high) + ", found " + std::to_string(v));
        return v;
    }

    float number(const char* what) {
        if (f_ >= nf_) throw Error(std::string("program: ends before ") + what);
        return float(floats_[f_++]);
    }

    const TensorRecord* tensor(const char* what) {  // may be absent: -1
        const int64_t i = integer(what, -1, nt_ - 1);
        return i < 0 ? nullptr : tensors_ + i;
    }

    Vector vector(const char* what, int64_t size) {
        const TensorRecord* t = tensor(what);
        if (!t) return {};
        if (t->kind != 0 || t->rows != size || t->bytes < pad16(size) * 4 || !t->data)
            throw Error(std::string("program: ") + what + ": expected a float32 vector of " + std::to_string(size));
        return {static_cast<const float*>(t->data), size};
    }

    // A matrix with its bias; rows or cols 0 = any.
    Linear linear(const char* what, int64_t rows, int64_t cols, bool required = true, bool may_turn = false) {
        const TensorRecord* t = tensor(what);
        Linear l;
        if (t) {
            l.w = matrix(what, *t);
            if ((rows && l.w.rows != rows) || (cols && l.w.cols != cols))
                throw Error(std::string("program: ") + what + ": expected a matrix of " + std::to_string(rows) + " x " +
                            std::to_string(cols) + ", found " + std::to_string(l.w.rows) + " x " + std::to_string(l.w.cols));
            if (l.w.format == INT) l.key = {l.w.group, t->perm};
            l.turned = t->turned != 0;
            if (l.turned && (!may_turn || l.w.format != INT)) throw Error(std::string("program: ") + what + ": turned by a Hadamard matrix");
        } else if (required) {
            throw Error(std::string("program: ") + what + ": the matrix is missing");
        }
        l.bias = vector(what, t ? l.w.rows : 0);
        return l;
    }

    // Of `heads` times `width` elements: all at once, or each head by itself with the same weights or its own.
    Norm norm(const char* what, int64_t width, int64_t heads = 1) {
        Norm n;
        n.size = integer(what, 0, LIMIT);
        n.sets = integer(what, 1, LIMIT);
        n.layer = integer(what, 0, 1) == 1;
        const bool each = n.size == width && (n.sets == 1 || n.sets == heads), whole = n.size == width * heads && n.sets == 1;
        if (n.size && !each && !whole)
            throw Error(std::string("program: ") + what + ": expected " + std::to_string(heads) + " x " + std::to_string(width) +
                        " elements, found " + std::to_string(n.sets) + " x " + std::to_string(n.size));
        n.weight = vector(what, n.size * n.sets);
        if (n.size && !n.weight) throw Error(std::string("program: ") + what + ": the weight is missing");
        n.bias = vector(what, n.size * n.sets);
        n.eps = number(what);
        return n;
    }

    void finish() const {
        if (i_ != ni_ || f_ != nf_) throw Error("program: longer than what it describes");
    }

private:
    static Matrix matrix(const char* what, const TensorRecord& t) {
        Matrix m;
        m.format = t.kind;
        m.dtype = t.dtype;
        m.bits = t.bits;
        m.group = t.group;
        m.minima = t.minima;
        m.rows = t.rows;
        m.cols = t.cols;
        m.data = static_cast<const uint8_t*>(t.data);
        const std::string name = std::string("program: ") + what + ": ";
        if (!m.data || (m.format != DENSE && m.format != INT)) throw Error(name + "not a packed matrix");
        if (m.dtype < F32 || m.dtype > F16 || m.rows < 1 || m.cols < 1 || m.rows > LIMIT || m.cols > LIMIT)
            throw Error(name + "bad dtype or shape");
        if (m.format == INT) {
            if ((m.bits != 4 && m.bits != 8) || m.group < 16 || m.group % 16 || m.cols % m.group)
                throw Error(name + "bad bits or group size");
            if (m.group * int64_t(m.bits == 8 ? 255 : 31) * 128 >= LIMIT) throw Error(name + "group too long for int32 sums");
        }
        if (t.bytes != m.tiles() * m.tile_bytes())
            throw Error(name + "expected " + std::to_string(m.tiles() * m.tile_bytes()) + " bytes, found " + std::to_string(t.bytes));
        if (t.perm) {
            if (t.perm_size != m.cols || m.format != INT) throw Error(name + "permutation of the wrong length");
            for (int64_t i = 0; i < t.perm_size; i++)
                if (t.perm[i] < 0 || t.perm[i] >= m.cols) throw Error(name + "permutation out of range");
        }
        return m;
    }

    const int64_t* ints_;
    const double* floats_;
    const TensorRecord* tensors_;
    int64_t ni_, nf_, nt_, i_ = 0, f_ = 0;
};

}  // namespace tk
