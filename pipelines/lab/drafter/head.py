"""The EAGLE3 head: one decoder layer that drafts from the target's hidden states.

EAGLE-3 (arXiv 2503.01840). At position ``p`` the head reads the target's hidden states after token
``p`` (three layers, mixed by ``fc``) and the embedding of the next token, and predicts the token
after that. For further draft tokens its own output replaces the target's states.

Names and arithmetic follow vLLM 0.32's ``llama_eagle3.py`` (default, norm-after-residual form), so
one checkpoint works in both. The head uses the target's embeddings and stores none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from decoder.contracts.errors import ModelError
from pipelines.lab.drafter.checkpoint import HeadConfig, read_checkpoint


class KV(NamedTuple):
    """Keys (rotated) and values of the head's layer, each float (kv_heads, length, head_dim)."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Grouped-query attention over the concatenated embedding and hidden state."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        # Not a buffer: a head cast to half precision would cast it too, and at positions in the
        # thousands the rotation would be off by whole turns.
        self._frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)

    def _heads(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(tokens, heads * head_dim) -> (heads, tokens, head_dim), rotated if positions are given.

        Rotation pairs the halves of a head ("NeoX" style), as in Llama checkpoints.
        """
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        if positions is None:
            return x
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(tokens, 2 * hidden) -> rotated queries (heads, tokens, head_dim)."""
        return self._heads(self.q_proj(x), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> KV:
        """(tokens, 2 * hidden) -> KV cache entries of these tokens."""
        return KV(self._heads(self.k_proj(x), positions), self._heads(self.v_proj(x)))


class Mlp(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The head's only decoder layer; its weights have the prefix ``midlayer.``."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = Mlp(c)

    def mixed(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The attention's input: (tokens, hidden) twice -> (tokens, 2 * hidden)."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after the layer, before the final norm.

        ``hidden`` (tokens, hidden) is the residual before its norm; ``attended`` is (heads, tokens,
        head_dim).
        """
        residual = hidden + self.self_attn.o_proj(attended.transpose(0, 1).flatten(1))
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Head(nn.Module):
    """The drafter: ``fc``, one layer, a norm, and logits over a reduced vocabulary.

    ``d2t`` (int64, draft vocabulary) holds offsets: target id = draft id + ``d2t[draft id]``.
    ``t2d`` (bool, target vocabulary) marks the target ids that can be drafted.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def target_ids(self) -> Tensor:
        """Target id of each draft id: int64 (draft vocabulary,)."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Map draft id ``i`` to ``target_ids[i]`` (int64, ascending, no repeats)."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True

    def advance(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        past: KV | None,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, KV]:
        """Run the head on positions of one sequence that follow the cached ones.

        Args:
            embeds: (tokens, hidden) target embeddings of the token *after* each position.
            hidden: (tokens, hidden) ``fc`` of the target's states at each position, or this
                method's first result for drafted positions.
            positions: int64 (tokens,) of ``hidden``.
            past: cache of all earlier positions; not modified.
            visible: bool (tokens, cached + tokens), attention mask; causal by default.

        Returns:
            hidden states for :meth:`logits` and for the next step, and the extended cache.
        """
        x = self.midlayer.mixed(embeds, hidden)
        cache = self.midlayer.self_attn.keys_values(x, positions)
        if past is not None:
            cache = KV(*(torch.cat(both, 1) for both in zip(past, cache, strict=True)))
        length, total = len(positions), cache.keys.shape[1]
        if visible is None and length > 1:
            visible = torch.ones(length, total, dtype=torch.bool, device=x.device)
            visible = visible.tril(total - length)
        attended = functional.scaled_dot_product_attention(
            self.midlayer.self_attn.queries(x, positions)[None],
            cache.keys[None],
            cache.values[None],
            attn_mask=visible,
            enable_gqa=True,
        )[0]
        return self.midlayer.after_attention(hidden, attended), cache

    def logits(self, hidden: Tensor) -> Tensor:
        """(tokens, hidden) of :meth:`advance` -> (tokens, draft vocabulary)."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    @torch.inference_mode()
    def extend(
        self, embedding: nn.Module, tokens: Tensor, aux: Tensor, past: KV | None
    ) -> tuple[Tensor, KV]:
        """Prefill the head with newly committed positions.

        Args:
            embedding: the target's, ids -> (tokens, hidden).
            tokens: int64 (n,) the tokens *after* each new position, the last one newly sampled.
            aux: (n, layers * hidden) the target's states at the new positions.
            past: cache of the earlier committed positions.

        Returns:
            (1, hidden) at the last position, and the cache of all committed positions.
        """
        start = 0 if past is None else past.keys.shape[1]
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        hidden, cache = self.advance(embedding(tokens), self.fc(aux), positions, past)
        return hidden[-1:], cache

    @torch.inference_mode()
    def chain(self, embedding: nn.Module, hidden: Tensor, committed: KV, k: int) -> list[int]:
        """Draft ``k`` > 0 target ids greedily from the result of :meth:`extend`."""
        position = torch.tensor([committed.keys.shape[1] - 1], device=hidden.device)
        drafted, cache = list[Tensor](), committed
        for step in range(k):
            if step:
                hidden, cache = self.advance(embedding(drafted[-1]), hidden, position + step, cache)
            best = self.logits(hidden).argmax(-1)
            drafted.append(best + self.d2t[best])
        return torch.cat(drafted).tolist()

    def drafter(self, embedding: nn.Module, length: int) -> Drafter:
        """Drafter of a new request, for chains of at most ``length`` tokens."""
        return Drafter(self, embedding, length)


class Drafter:
    """Model drafter of one request: drafts chains of at most ``length`` tokens.

    Tokens committed while other arms are chosen are prefilled in one pass before the next draft.
    The cache is the same as with one pass a cycle (vLLM's drafting of zero tokens), for less time.
    """

    def __init__(self, head: Eagle3Head, embedding: nn.Module, length: int) -> None:
        self._head, self._embedding, self._length = head, embedding, length
        self._past: KV | None = None
        self._hidden: Tensor | None = None
        self._tokens: list[int] = []
        self._aux: list[Tensor] = []

    def follow(self, tokens: list[int], aux: Tensor) -> None:
        """Add committed positions: the target's states, and the token after each."""
        self._tokens += tokens
        self._aux.append(aux)

    def catch_up(self) -> tuple[Tensor, KV]:
        """Prefill the added positions; returns the last state and the cache of all positions."""
        if self._tokens:
            tokens = torch.tensor(self._tokens, device=self._aux[0].device)
            self._hidden, self._past = self._head.extend(
                self._embedding, tokens, torch.cat(self._aux), self._past
            )
            self._tokens, self._aux = [], []
        assert self._hidden is not None and self._past is not None
        return self._hidden, self._past

    def draft(self, room: int) -> list[int]:
        """A draft of at most ``room`` > 0 tokens."""
        hidden, past = self.catch_up()
        return self._head.chain(self._embedding, hidden, past, min(self._length, room))


def load_head(
    path: Path, *, hidden_size: int, vocab_size: int, layers: int | None = None
) -> Eagle3Head:
    """Load a head in float32 for a target of the given sizes.

    Args:
        layers: depth of the target, for heads whose configuration names no aux layers.

    Raises:
        ModelError: the checkpoint is missing, incomplete, or made for another target.
    """
    config, weights = read_checkpoint(path, layers)
    for what, has, needs in (
        ("hidden size", config.hidden_size, hidden_size),
        ("vocabulary", config.vocab_size, vocab_size),
    ):
        if has != needs:
            raise ModelError(
                f"drafter {path} has {what} {has}, the target has {needs}: "
                "use the head that was trained for this target"
            )
    if layers is not None and not all(0 <= i < layers for i in config.aux_layers):
        raise ModelError(
            f"drafter {path} reads layers {list(config.aux_layers)}, the target has {layers}: "
            "use the head that was trained for this target"
        )
    head = Eagle3Head(config)
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"drafter {path} does not have the EAGLE3 layout: {error}") from error
    return head.eval()


def head_at(name: str | Path | None) -> Callable[[Any], Eagle3Head] | None:
    """Loads the head ``name``, a directory or a hub name, for a target's configuration; None for
    None. The function raises as :func:`load_head`."""
    if name is None:
        return None
    return lambda target: load_head(
        _local(name),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layers=target.num_hidden_layers,
    )


def _local(name: str | Path) -> Path:
    """The directory of a checkpoint; a hub name is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name)))
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"drafter {name} is no directory and cannot be fetched from the hub: {error}"
        ) from error
