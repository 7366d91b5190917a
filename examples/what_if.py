# %% [markdown]
# # What-if study: a faster network, or another strategy?
#
# We train a 7B model on 16 nodes of 8 A100 with 80 Gbit/s between nodes, one sequence of 2,048
# tokens per GPU and step, as CO2's authors measured it. Throughput is poor.
# Should we buy a faster network, or change the strategy? Every cell answers one question; run
# them one by one in an editor that knows `# %%` cells (VS Code, PyCharm, Jupyter with jupytext),
# or all at once: `python examples/what_if.py`.

# %%
import pandas as pd

import co2sim

CLUSTER, MODEL, GPUS = "a100-tcp80-calibrated", "transnormer-7b", 128
BATCH = {"micro_batch": 1, "accumulation": 1, "recompute": "none"}  # 2,048 tokens a GPU and step
PRICE = {"price_per_gpu": "2 USD/h"}  # what we pay


def study(strategies: list[str]) -> pd.DataFrame:
    """One row a strategy: throughput, what is exposed, memory and price."""
    found = co2sim.sweep(
        CLUSTER,
        MODEL,
        gpus=GPUS,
        vary={"strategy": strategies},
        overrides=PRICE,
        progress=False,
        **BATCH,
    )
    return pd.DataFrame(
        {
            "strategy": found["strategy"],
            "tokens/s": found["tokens_per_s"].round().astype(int),
            "exposed %": (100 * found["exposed_comm_s"] / found["round_time_s"]).round(1),
            "GB": (found["memory_total_bytes"] / 1e9).round(1),
            "fits": found["fits_in_memory"],
            "USD/1e9 tokens": found["usd_per_billion_tokens"].round().astype(int),
        }
    ).set_index("strategy")


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
# which τ on is the average hidden? Without a tau, CO2 chooses it. The 6 % that stay are collectives
# of ZeRO-2 inside the node.

# %%
CO2 = "co2(tau={}, worker=node)"
print(study([CO2.format(tau) for tau in (6, 12, 24, 48)]), end="\n\n")

# %% [markdown]
# ## A faster network
#
# How many Gbit/s would ZeRO++ need to be as fast as CO2 with τ = 24 is today?

# %%
target = study([CO2.format(24)])["tokens/s"].iloc[0]
gbits = [80, 160, 320, 640, 1280, 2560]
faster = co2sim.sweep(
    CLUSTER,
    MODEL,
    "zeropp",
    gpus=GPUS,
    vary={"inter.bandwidth": [f"{speed} Gbit/s" for speed in gbits]},
    progress=False,
    **BATCH,
)
for speed, tokens in zip(gbits, faster["tokens_per_s"], strict=True):
    print(
        f"zeropp at {speed:4} Gbit/s: {tokens:7,.0f} tokens/s, {tokens / target:.0%} of CO2"
        " at 80 Gbit/s"
    )

# %% [markdown]
# A caution: these are tokens per second, not time to a model. CO2 needs more steps for the same
# loss in short trainings (see the training guide), and `co2analysis tau` says what τ costs in
# guaranteed error.
