# %% [markdown]
# # What-if study: a faster network, or another strategy?
#
# We train a 7B model on 16 nodes of 8 A100 with 80 Gbit/s between nodes. Throughput is poor.
# Should we buy a faster network, or change the strategy? Every cell answers one question; run
# them one by one in an editor that knows `# %%` cells (VS Code, PyCharm, Jupyter with jupytext),
# or all at once: `python examples/what_if.py`.

# %%
import pandas as pd

import co2sim

CLUSTER, MODEL, GPUS = "a100-tcp80-calibrated", "transnormer-7b", 128
PRICE = {"price_per_gpu": "2 USD/h"}  # what we pay


def study(strategies: list[str], **overrides: str) -> pd.DataFrame:
    """One row a strategy: throughput, what is exposed, memory and price."""
    rows = []
    for strategy in strategies:
        changed = PRICE | {name.replace("__", "."): text for name, text in overrides.items()}
        found = co2sim.simulate(CLUSTER, MODEL, strategy, gpus=GPUS, overrides=changed)
        rows.append(
            {
                "strategy": found.strategy,
                "tokens/s": round(found.tokens_per_s),
                "exposed %": round(100 * found.exposed_share, 1),
                "GB": round(found.memory_bytes_per_gpu["total"] / 1e9, 1),
                "fits": found.fits_in_memory,
                "USD/1e9 tokens": round(found.usd_per_billion_tokens or 0.0),
            }
        )
    return pd.DataFrame(rows).set_index("strategy")


# %% [markdown]
# ## Today
#
# More than three quarters of a step is communication that nothing hides. DDP is no choice: it
# does not fit.

# %%
print(study(["ddp", "zero2", "zero3", "zeropp"]), end="\n\n")

# %% [markdown]
# ## Another strategy
#
# A node as a worker of CO2: ZeRO-2 inside the node, an average between nodes every τ steps. From
# which τ on is the average hidden? The 6 % that stay are collectives of ZeRO-2 inside the node.

# %%
CO2 = "co2(tau={}, worker=node)"
print(study([CO2.format(tau) for tau in (6, 12, 24, 48)]), end="\n\n")

# %% [markdown]
# ## A faster network
#
# How many Gbit/s would ZeRO++ need to be as fast as CO2 with τ = 24 is today?

# %%
target = study([CO2.format(24)])["tokens/s"].iloc[0]
for gbits in (80, 160, 320, 640, 1280, 2560):
    speed = study(["zeropp"], inter__bandwidth=f"{gbits} Gbit/s")["tokens/s"].iloc[0]
    print(
        f"zeropp at {gbits:4} Gbit/s: {speed:7,} tokens/s, {speed / target:.0%} of CO2 at 80 Gbit/s"
    )

# %% [markdown]
# A caution: these are tokens per second, not time to a model. CO2 needs more steps for the same
# loss in short trainings (see the training guide), and `co2analysis tau` says what τ costs in
# guaranteed error.
