"""What the Hybrid Verified Decoding paper reports, to set beside what is measured here."""

from __future__ import annotations

from typing import Final

MODELS: Final = ("Qwen3-8B", "Qwen3-4B", "Llama3.1-8B")
BASELINES: Final = ("greedy", "eagle3", "suffix", "frequency")
"""Columns of Table 1: Hybrid Verified Decoding's throughput over that of each."""

Row = tuple[float, float, float, float]

TABLE_1: Final[dict[str, tuple[str, tuple[Row, Row, Row]]]] = {
    "delegate52": (
        "Delegate-52",
        ((3.25, 1.44, 2.14, 1.06), (3.40, 1.90, 1.64, 1.18), (3.46, 3.38, 0.81, 1.24)),
    ),
    "fineedit": (
        "InstructEdit/FineEdit",
        ((3.57, 1.51, 2.30, 1.32), (4.21, 2.67, 1.72, 1.22), (7.56, 5.49, 1.15, 1.20)),
    ),
    "repobench": (
        "RepoBench",
        ((2.54, 1.09, 2.15, 1.15), (3.57, 1.56, 1.44, 0.81), (2.12, 2.99, 1.09, 1.26)),
    ),
    "swebench_openhands": (
        "SWE-bench OpenHands",
        ((3.70, 1.09, 3.21, 1.28), (2.50, 1.08, 1.52, 0.88), (3.31, 2.11, 2.60, 1.26)),
    ),
    "magicoder": (
        "Magicoder",
        ((3.31, 1.08, 3.79, 1.34), (1.73, 1.02, 1.82, 0.87), (5.86, 2.51, 4.28, 1.27)),
    ),
    "mbpp": (
        "MBPP",
        ((4.49, 1.17, 4.78, 1.54), (2.73, 0.90, 2.11, 1.01), (3.68, 0.99, 4.65, 1.05)),
    ),
    "bfcl": (
        "BFCL",
        ((2.31, 0.98, 3.13, 1.27), (2.19, 0.98, 2.47, 1.13), (1.02, 0.90, 1.32, 1.01)),
    ),
    "spider": (
        "Spider",
        ((3.12, 0.97, 2.98, 1.33), (1.56, 1.01, 1.79, 0.88), (4.46, 1.85, 3.61, 1.24)),
    ),
    "hotpotqa": (
        "HotpotQA",
        ((2.57, 0.95, 3.77, 1.37), (2.03, 0.81, 1.97, 1.02), (2.23, 0.93, 2.70, 0.96)),
    ),
    "musique": (
        "MuSiQue",
        ((3.55, 0.95, 2.88, 1.17), (2.12, 1.18, 1.35, 1.05), (3.00, 3.22, 1.15, 1.97)),
    ),
    "2wikimultihopqa": (
        "2WikiMultiHopQA",
        ((2.73, 0.96, 3.28, 1.40), (2.01, 1.19, 1.65, 0.98), (2.52, 1.04, 2.49, 0.87)),
    ),
    "infinitebench": (
        "InfiniteBench",
        ((5.03, 2.42, 3.04, 1.21), (5.53, 2.51, 2.40, 1.16), (2.23, 2.84, 1.47, 2.94)),
    ),
    "cnn_dailymail": (
        "CNN/DailyMail",
        ((2.33, 0.94, 3.85, 1.34), (1.79, 0.99, 2.75, 1.02), (2.43, 0.94, 3.83, 1.04)),
    ),
    "gov_report": (
        "GovReport",
        ((2.03, 0.95, 3.36, 1.18), (1.52, 1.01, 2.08, 1.02), (0.95, 1.31, 0.98, 1.15)),
    ),
    "alpaca": (
        "Alpaca",
        ((2.73, 0.97, 3.84, 1.40), (2.06, 0.85, 2.40, 0.83), (3.14, 0.96, 5.68, 1.05)),
    ),
    "mt_bench": (
        "MT-Bench",
        ((3.34, 0.98, 4.68, 1.41), (1.59, 0.99, 2.06, 0.87), (3.24, 1.18, 4.76, 1.10)),
    ),
}
"""Table 1: by dataset, its printed name and for each model the ratios over ``BASELINES``."""

TABLES_11_TO_13: Final[dict[str, tuple[tuple[float | None, ...], ...]]] = {
    "greedy": (
        (39.9, 998.7, None, None, None),
        (38.3, 1000.0, None, None, None),
        (40.7, 1000.0, None, None, None),
    ),
    "eagle3": (
        (109.5, 240.2, 3.16, 0.0, 100.0),
        (76.7, 309.7, 2.23, 0.0, 100.0),
        (47.7, 571.0, 0.75, 0.0, 100.0),
    ),
    "suffix": (
        (42.1, 397.8, 1.51, 97.6, 0.0),
        (54.6, 346.1, 1.89, 97.6, 0.0),
        (78.2, 264.0, 2.79, 93.9, 0.0),
    ),
    "frequency": (
        (105.0, 188.4, 4.31, 8.0, 92.0),
        (104.5, 223.9, 3.47, 8.2, 91.8),
        (98.3, 234.9, 3.26, 9.4, 90.6),
    ),
    "hybrid": (
        (133.0, 189.7, 4.27, 9.7, 90.3),
        (101.1, 228.6, 3.37, 8.8, 91.2),
        (126.2, 200.1, 4.00, 18.6, 81.4),
    ),
}
"""By method and model: tokens/s, cycles per 1K tokens, accepted, cache %, EAGLE3 %."""

TABLE_2: Final = ((4.8, 3.8, 78.2, 61.4), (6.6, 5.4, 82.9, 67.8), (8.9, 8.1, 87.6, 79.8))
"""By model: high-payoff %, selected %, precision, recall."""

TABLE_4: Final = (
    ("none", "eagle3", 1.20, 455, 55.6),
    ("chat", "eagle3", 4.21, 192, 134.4),
    ("none", "hybrid", 7.32, 120, 194.2),
)
"""Llama3.1-8B on MT-Bench: template, method, accepted, cycles per 1K tokens, tokens/s."""

STAND_INS: Final = {
    "InstructEdit/FineEdit": "fineedit",
    "RepoBench": "repobench",
    "Magicoder-Evol-Instruct": "magicoder",
    "InfiniteBench": "infinitebench",
}
"""The dataset that a local set's ``standin_for`` names."""


def counterpart(dataset: str, standin_for: str | None) -> str | None:
    """The row of Table 1 to set beside ``dataset``: itself, or what it stands in for."""
    if dataset in TABLE_1:
        return dataset
    return STAND_INS.get(standin_for or "")
