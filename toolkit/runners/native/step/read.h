// Readers of mixers, one a kind, from the record that mixers.py writes of it. All raise Error.
#pragma once

#include "step/record.h"

namespace tk {

Mixer read_attention(const Record& r, Program& prog);
Mixer read_reuse(const Record& r, Program& prog);
Mixer read_latent(const Record& r, Program& prog);
Mixer read_cross(const Record& r, Program& prog);
Mixer read_short_conv(const Record& r, Program& prog);
Mixer read_delta(const Record& r, Program& prog);
Mixer read_mamba(const Record& r, Program& prog);
Mixer read_mlp(const Record& r, Program& prog);
Mixer read_moe(const Record& r, Program& prog);
Mixer read_per_layer(const Record& r, Program& prog);

// An MLP whose input is `in`, which its linears join. `may_route`: tokens of pictures may have others.
Mlp read_one_mlp(const Record& r, int64_t hidden, Input& in, bool may_route = false);

// Says that `l` reads `in`: how the input is then quantized, and which of its quantizations is the linear's.
void join(Input& in, Linear& l);

}  // namespace tk
