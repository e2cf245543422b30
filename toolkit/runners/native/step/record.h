// The program as it comes from program.py: values with their names ("sublayers.3.attention.heads"), read by name and checked.
// A record or a list has a value too: how many entries it has. Raises Error.
#pragma once

#include <cmath>
#include <string>
#include <unordered_map>

#include "step/program.h"

namespace tk {

constexpr int64_t LIMIT = int64_t(1) << 31;

// All values of a program, and which of them have been read.
class Values {
public:
    // `names`: each ends with a new line.
    Values(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size)
        : tensors_(tensors), tensors_size_(tensors_size) {
        found_.reserve(size_t(count));
        for (int64_t i = 0; i < count; i++) {
            const char* end = names;
            while (*end && *end != '\n') end++;
            if (!*end) throw Error("program: fewer names than values");
            std::string name(names, end);
            if (!found_.emplace(name, Value{values[i], false}).second) throw Error("program: " + name + ": given twice");
            names = end + 1;
        }
        if (*names) throw Error("program: more names than values");
    }

    // Raises Error where something has not been read: nobody knows what it means.
    void finish() const {
        const std::string* odd = nullptr;
        for (const auto& [name, value] : found_)
            if (!value.read && (!odd || name < *odd)) odd = &name;
        if (odd) throw Error("program: " + *odd + ": unknown");
    }

    // Linears that have been read, by their sites.
    const std::vector<Linear>& sites() const { return sites_; }

private:
    friend class Record;
    struct Value {
        double number;
        bool read;
    };
    std::unordered_map<std::string, Value> found_;
    const TensorRecord* tensors_;
    int64_t tensors_size_;
    std::vector<Linear> sites_;
};

// Those whose names begin alike.
class Record {
public:
    explicit Record(Values& all, std::string prefix = "") : all_(all), prefix_(std::move(prefix)) {}

    bool has(const std::string& key) const { return all_.found_.count(prefix_ + key) > 0; }

    Record record(const std::string& key) const {
        value(key);
        return Record(all_, prefix_ + key + ".");
    }

    // Entry `i` of a list of records.
    Record entry(const std::string& list, int64_t i) const { return record(list + "." + std::to_string(i)); }

    int64_t integer(const std::string& key, int64_t low, int64_t high) const {
        const double v = value(key);
        if (!(v >= double(low) && v <= double(high)) || v != std::floor(v))
            fail(key, "expected an integer from " + std::to_string(low) + " to " + std::to_string(high) + ", found " + std::to_string(v));
        return int64_t(v);
    }

    bool flag(const std::string& key) const { return integer(key, 0, 1) == 1; }

    float number(const std::string& key) const { return float(value(key)); }

    const TensorRecord& tensor(const std::string& key) const {
        return all_.tensors_[integer(key, 0, all_.tensors_size_ - 1)];
    }

    // Absent where there is no such key.
    Vector vector(const std::string& key, int64_t size) const {
        if (!has(key)) return {};
        const TensorRecord& t = tensor(key);
        if (t.kind != 0 || t.rows != size || t.bytes < pad16(size) * 4 || !t.data)
            fail(key, "expected a float32 vector of " + std::to_string(size));
        return {static_cast<const float*>(t.data), size};
    }

    Vector needed(const std::string& key, int64_t size) const {
        value(key);
        return vector(key, size);
    }

    // A matrix with its bias; rows or cols 0 = any.
    Linear linear(const std::string& key, int64_t rows, int64_t cols, bool may_turn = false) const {
        const Record r = record(key);
        const TensorRecord& t = r.tensor("matrix");
        Linear l;
        l.w = r.matrix(t);
        if ((rows && l.w.rows != rows) || (cols && l.w.cols != cols))
            fail(key, "expected a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) + ", found " +
                          std::to_string(l.w.rows) + " x " + std::to_string(l.w.cols));
        if (l.w.format == INT) l.key = {l.w.group, t.perm};
        l.turned = t.turned != 0;
        if (l.turned && (!may_turn || l.w.format != INT)) fail(key, "turned by a Hadamard matrix");
        l.bias = r.vector("bias", l.w.rows);
        l.own = r.own(l.w.tiles());
        if (r.has("site")) {
            l.site = int(r.integer("site", 0, (1 << 24) - 1));
            if (all_.sites_.size() <= size_t(l.site)) all_.sites_.resize(size_t(l.site) + 1);
            all_.sites_[size_t(l.site)] = l;
        }
        return l;
    }

    // Of `count` those that are this rank's; all where it is not said.
    Range own(int64_t count) const {
        if (!has("own")) return {0, count};
        const Record r = record("own");
        const int64_t first = r.integer("first", 0, count);
        return {first, r.integer("last", first, count)};
    }

    // One that may be another for tokens of pictures.
    Linear routed(const std::string& key, int64_t rows, int64_t cols) const {
        Linear l = linear(key, rows, cols);
        const Record r = record(key);
        if (!r.has("seen")) return l;
        const Record other = r.record("seen");
        l.seen = std::make_shared<Routed>();
        if (other.has("whole")) {
            l.seen->whole = other.linear("whole", l.w.rows, l.w.cols);
            return l;
        }
        l.seen->a = other.linear("a", 0, l.w.cols);
        l.seen->b = other.linear("b", l.w.rows, l.seen->a.w.rows);
        l.seen->scale = other.number("scale");
        if (l.seen->a.w.format != DENSE || l.seen->b.w.format != DENSE) fail(key, "of low rank in integers");
        return l;
    }

    Linear maybe_linear(const std::string& key, int64_t rows, int64_t cols) const {
        return has(key) ? linear(key, rows, cols) : Linear();
    }

    // Of `heads` times `width` elements: all at once, or each head by itself with the same weights or its own. May be absent.
    Norm norm(const std::string& key, int64_t width, int64_t heads = 1) const {
        Norm n;
        if (!has(key)) return n;
        const Record r = record(key);
        n.size = r.integer("size", 1, LIMIT);
        n.sets = r.integer("sets", 1, LIMIT);
        n.layer = r.flag("layer");
        const bool each = n.size == width && (n.sets == 1 || n.sets == heads), whole = n.size == width * heads && n.sets == 1;
        if (!each && !whole)
            fail(key, "expected " + std::to_string(heads) + " x " + std::to_string(width) + " elements, found " +
                          std::to_string(n.sets) + " x " + std::to_string(n.size));
        n.weight = r.needed("weight", n.size * n.sets);
        n.bias = r.vector("bias", n.size * n.sets);
        n.eps = r.number("eps");
        return n;
    }

    Norm needed_norm(const std::string& key, int64_t width) const {
        value(key);
        return norm(key, width);
    }

    [[noreturn]] void fail(const std::string& key, const std::string& what) const { throw Error("program: " + prefix_ + key + ": " + what); }

    Matrix matrix(const TensorRecord& t) const {
        Matrix m;
        m.format = t.kind;
        m.dtype = t.dtype;
        m.bits = t.bits;
        m.group = t.group;
        m.minima = t.minima;
        m.trellis = t.trellis;
        m.rows = t.rows;
        m.cols = t.cols;
        m.data = static_cast<const uint8_t*>(t.data);
        auto wrong = [&](const std::string& what) { fail("matrix", what); };
        if (!m.data || (m.format != DENSE && m.format != INT)) wrong("not a packed matrix");
        if (m.dtype < F32 || m.dtype > ONES || m.rows < 1 || m.cols < 1 || m.rows > LIMIT || m.cols > LIMIT)
            wrong("bad dtype or shape");
        if (m.format == DENSE && m.dtype == ONES) wrong("bad dtype");
        if (m.format == INT) {
            const bool known = m.trellis ? m.bits >= 2 && m.bits <= 4 && m.dtype == F16 && !m.minima : m.bits == 4 || m.bits == 8;
            if (!known || m.trellis < 0 || m.trellis > TRELLIS_VERSION || m.group < 16 || m.group % 16 || m.cols % m.group) wrong("bad bits or group size");
            if (m.dtype == ONES && (m.bits != 8 || m.minima)) wrong("scales of 1 beside 4 bits or minima");
            if (m.group * int64_t(m.bits == 8 || m.trellis ? 255 : 31) * 128 >= LIMIT) wrong("group too long for int32 sums");
        }
        if (t.bytes != m.tiles() * m.tile_bytes())
            wrong("expected " + std::to_string(m.tiles() * m.tile_bytes()) + " bytes, found " + std::to_string(t.bytes));
        if (t.perm) {
            if (t.perm_size != m.cols || m.format != INT || m.trellis) wrong("permutation of the wrong length");
            for (int64_t i = 0; i < t.perm_size; i++)
                if (t.perm[i] < 0 || t.perm[i] >= m.cols) wrong("permutation out of range");
        }
        return m;
    }

private:
    double value(const std::string& key) const {
        const auto at = all_.found_.find(prefix_ + key);
        if (at == all_.found_.end()) fail(key, "missing");
        at->second.read = true;
        return at->second.number;
    }

    Values& all_;
    std::string prefix_;
};

}  // namespace tk
