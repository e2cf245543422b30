// `tile` with codes unpacked half a step ahead: while one half's products run, the same warp makes the next half's
// operands, a few behind each column's products. That takes registers for both, so a multiprocessor holds one block, and
// a stage more, since a step's last products are done when the next step is there. The sums are those of `tile`, bit for
// bit. No GPU has run it: `scripts/bench_gpu --tune` measures it, and chooses it where it is faster.
#pragma once

#include "linear_tile.cuh"

namespace tk {

template <class T, int BITS, int SPAN, int NT>
struct LinearAhead : LinearTile<T, BITS, SPAN, NT, 4> {
    using Tile = LinearTile<T, BITS, SPAN, NT, 4>;
    using Operands = uint32_t[Tile::TILES][2][4];
    static constexpr int PIECES = Tile::TILES * 2;  // operands of half a step

    using Tile::Tile;

    TK_DEVICE void run() {
        const int first = this->step;
        Zeros of_rows[Tile::TILES];
        this->begin(of_rows);
        float sum[Tile::TILES][Tile::COLUMNS][4] = {};
        typename Tile::Half half;
        Operands left, right;  // of a step's first half and of its second
        const auto unpack_into = [&](Operands& to) {
            return [&](int n) {  // pieces are spread over the columns
#pragma unroll
                for (int piece = n * PIECES / Tile::COLUMNS; piece < (n + 1) * PIECES / Tile::COLUMNS; ++piece)
                    this->unpack(to[piece / 2][piece % 2], half, piece / 2, piece % 2);
            };
        };
        int slot = 0, before = 0;
        bool held = false;  // products of the step before are left
        for (int now = first; now < this->last + this->deep; now += Tile::DEEP) {  // as often in all warps
            this->next(slot);
            this->read(half, slot, 0, of_rows);
            const auto more = unpack_into(left);
            if (held) {
                this->products(sum, right, before, 1, more);
            } else {
#pragma unroll
                for (int n = 0; n < Tile::COLUMNS; ++n) more(n);
            }
            held = now < this->last;
            if (held) {
                this->read(half, slot, 1, of_rows);
                this->products(sum, left, slot, 0, unpack_into(right));
            }
            before = slot, slot = slot + 1 == Tile::STAGES ? 0 : slot + 1;
        }
        if (held) this->products(sum, right, before, 1, [](int) {});
        this->finish(sum);
    }
};

template <class T, int BITS, int SPAN, int NT>
TK_DEVICE void linear_ahead(const Linear& p, unsigned char* shared) {
    LinearAhead<T, BITS, SPAN, NT>(p, shared).run();
}

}  // namespace tk
