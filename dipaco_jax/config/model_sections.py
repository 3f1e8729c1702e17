"""Sections of the settings: the text, its tokenizer, the model of a path, and the base model."""

import dataclasses

from dipaco_jax.config.fields import Source, field


@dataclasses.dataclass(frozen=True)
class Data:
  """Source of documents."""

  source: str = field(
    'auto',
    "Source of the training text. 'auto' is 'files' if data.train or data.validation is set, 'seqio' if "
    "data.module is set, 'tfds' if data.name has a version, and otherwise 'stdlib', Python's own source "
    'code and documentation.',
    choices='auto files stdlib tfds seqio',
    extensible=True,
  )
  train: tuple[str | Source, ...] = field(
    (),
    'Files to train on: globs of .txt, .jsonl, .parquet, .arrow, .tar or .bin files, or a mixture of '
    '(name, globs, weight), weighted by bytes of text. Empty if the text comes from another source.',
    example="('books/*.txt',)",
  )
  validation: tuple[str | Source, ...] = field(
    (),
    'Files to validate on, written as in data.train. If empty, part of the training text is held back.',
    example="('books/*.txt',)",
  )
  name: str = field(
    '', "Name of a TensorFlow Datasets dataset with its version, such as 'c4/en:3.0.1', or of a SeqIO task or mixture."
  )
  data_dir: str = field(
    '', 'Folder or gs:// URL with prepared TensorFlow Datasets; required for tfds, optional for seqio.'
  )
  module: str = field('', 'Python module to import; it must register the SeqIO task or mixture. Empty imports none.')
  validation_fraction: float = field(
    0.02, 'Fraction of the text held back for validation if the source has no validation split.', below=1
  )
  min_validation_tokens: int = field(
    1000,
    'Minimum number of validation tokens per path. More text is held back to reach it, up to '
    'data.max_validation_fraction. 0 means no minimum.',
    zero=True,
  )
  max_validation_fraction: float = field(
    0.1, 'Largest fraction of the text that may be held back to reach data.min_validation_tokens.', below=1
  )
  max_validation_documents: int = field(
    1000, 'Maximum number of validation documents, sampled from all if they are in files. 0 means all.', zero=True
  )
  max_documents: int = field(
    0, 'Maximum number of documents to read, including those held back. 0 reads all.', zero=True
  )
  parts: int = field(
    1, 'Number of parts in which text is tokenized. Results depend on it, but not on the number of processes.'
  )
  format: str = field(
    'text',
    "What a record of the files is: 'text', or 'messages', a conversation whose answers are trained on, as a list of "
    'objects with a role and a content. Conversations require a tokenizer with a chat template.',
    choices='text messages',
    added=True,
  )
  text_key: str = field(
    'text',
    "Key of a document's text in a record; 'a.b' is the key b inside a. Conversations are under 'messages' by default.",
  )
  domain_key: str = field(
    'domain',
    "Key of a document's domain in a record; perplexity is reported by domain. Documents of files without"
    ' it have their folder or file name as domain.',
  )
  plain_suffixes: tuple[str, ...] = field(
    (), 'Suffixes of additional files that are read as plain text.', example="('.py', '.log')"
  )
  skip_bad_records: bool = field(
    False,
    'Whether to skip and count records that have no text or are not valid JSON or UTF-8. If False, they are errors.',
    may_change=True,
  )
  holdout_fraction: float = field(
    0.01, 'Fraction of the training documents held out for early stopping [2.7].', zero=True, below=1
  )
  own_text: bool = field(
    False,
    'Whether paths train on text that stays with its owners, whose workers bring it (see docs/owners.md). The text of '
    'this config is then public: it is for the tokenizer, the base model and the validation. Requires routing.method='
    "'owner'.",
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A given tokenizer, or one trained on a seeded sample of the training text."""

  model_file: str = field(
    '',
    'Existing tokenizer: a SentencePiece .model or a tokenizer.json. If empty, one is trained.',
  )
  kind: str = field(
    'sentencepiece',
    "Kind of tokenizer to train: a SentencePiece BPE model, or byte-level BPE for 'bytes'.",
    choices='sentencepiece bytes',
    extensible=True,
  )
  vocab_size: int = field(32_000, 'Vocabulary size of the tokenizer to train.', most=2**24)
  sample_bytes: int = field(
    20_000_000, 'Size of the random sample of training text that the tokenizer is trained on, in bytes.'
  )


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer; the defaults are the 150M path of the paper [7.1], in Llama's shape."""

  width: int = field(896, 'Width of the hidden state between blocks.', most=2**20)
  num_layers: int = field(12, 'Number of transformer blocks.', most=1000)
  num_heads: int = field(16, 'Number of attention heads.', most=2**16)
  head_dim: int = field(64, 'Size of each attention head; it must be even.', most=2**16)
  mlp_dim: int = field(2432, 'Width of the hidden layer of the gated MLP, or of each expert.', most=2**24)
  seq_len: int = field(
    1024,
    'Length of a training row in tokens. Longer documents are cut into sequences of at most this length.',
    most=2**24,
  )
  tied: bool = field(
    True, 'Whether the output head uses the transposed embedding matrix instead of parameters of its own.'
  )
  dtype: str = field(
    'auto',
    "Dtype of computation; 'auto' is float32 on CPUs and bfloat16 elsewhere. Parameters are float32.",
    choices='auto float32 bfloat16',
  )
  attention: str = field(
    'auto',
    "Attention implementation; 'auto' is 'splash' on TPUs, 'flash' (or 'xla' where it is not supported) "
    "on GPUs, and 'blocked' on CPUs.",
    choices='auto xla blocked flash cudnn splash',
  )
  product_dtype: str = field(
    'auto',
    "Dtype of matrix products of bfloat16 arrays before rounding; 'auto' is float32 on CPUs and bfloat16 elsewhere.",
    choices='auto float32 bfloat16',
  )
  layers: str = field(
    'auto',
    "How blocks are compiled: 'unrolled' compiles each block; 'scanned' compiles repeated blocks once, "
    "but copies their matrices. 'auto' is 'scanned' on TPUs.",
    choices='auto scanned unrolled',
  )
  remat: str = field(
    'none',
    "Activations to recompute in the backward pass: 'full' recomputes all of a block, 'dots' all but "
    'results of matrix products, splash and flash.',
    choices='none full dots',
  )
  loss_chunk: int = field(1024, 'Maximum number of tokens whose logits are in memory at once.')
  vocab_chunk: int = field(
    0,
    'Maximum number of vocabulary entries whose logits are in memory at once. 0 means all.',
    zero=True,
  )
  rope_base: float = field(10_000.0, 'Base of the frequencies of the rotary embedding (RoPE).')
  norm_epsilon: float = field(1e-6, 'Epsilon that RMSNorm adds to the mean square.')
  num_kv_heads: int = field(
    0,
    'Number of heads of keys and values, a divisor of model.num_heads. 0 means model.num_heads.',
    zero=True,
  )
  qk_norm: str = field(
    'none',
    "RMSNorm of queries and keys: of each head ('head') or of all heads together ('all').",
    choices='none head all',
  )
  qkv_bias: bool = field(False, 'Whether the projections to queries, keys and values have biases.')
  norms: str = field(
    'before',
    'Position of RMSNorm: before attention and MLP, after them, or both.',
    choices='before after both',
  )
  norm_from_one: bool = field(
    False, 'Whether RMSNorm multiplies by 1 + its scale parameter instead of by the parameter itself.'
  )
  activation: str = field(
    'silu', "Activation function of the MLP's gate; 'gelu' is the tanh approximation.", choices='silu gelu'
  )
  num_experts: int = field(
    0,
    'Number of experts in place of the MLP of each block (mixture of experts). 0 means one MLP for all tokens.',
    zero=True,
    most=2**16,
    added=True,
  )
  experts_per_token: int = field(
    2, 'Number of experts that a token passes through, with model.num_experts.', added=True
  )
  normalize_gates: bool = field(
    False,
    "Whether the probabilities of a token's experts are divided by their sum, with model.num_experts.",
    added=True,
  )
  shared_expert_dim: int = field(
    0,
    'Width of the hidden layer of an MLP that all tokens pass through beside their experts. 0 means none.',
    zero=True,
    most=2**24,
    added=True,
  )
  experts: str = field(
    'auto',
    "How experts are multiplied: 'ragged' by jax.lax.ragged_dot; 'megablox' likewise, with a kernel for TPUs for the "
    "gradients of their matrices; 'blocked' in blocks of tokens of one expert. 'auto' is 'megablox' on TPUs, 'blocked' "
    "on CPUs and 'ragged' elsewhere.",
    choices='auto ragged megablox blocked',
    added=True,
  )
  balance_loss: float = field(
    0.0, 'Weight of the loss by which a router chooses its experts equally often, in training.', zero=True, added=True
  )
  router_z_loss: float = field(
    0.0, "Weight of the square of the logarithm of a router's normalizer, in training.", zero=True, added=True
  )
  embed_scale: bool = field(False, 'Whether embeddings are multiplied by sqrt(model.width).')
  query_scale: float = field(
    0.0, 'Number by whose square root attention logits are divided. 0 means model.head_dim.', zero=True
  )
  attention_cap: float = field(0.0, 'Soft cap of attention logits: cap * tanh(logits / cap). 0 disables it.', zero=True)
  window: int = field(
    0,
    'Size of the sliding attention window in tokens, including the token itself. 0 means no window.',
    zero=True,
  )
  full_every: int = field(
    0, 'Every n-th block attends to all earlier tokens in spite of model.window. 0 means none.', zero=True
  )
  rope_scaling: str = field(
    'none',
    'Method that scales the rotary embedding (RoPE) to contexts longer than in pretraining.',
    choices='none linear llama3 yarn',
  )
  rope_factor: float = field(1.0, 'Factor by which RoPE scaling extends the context length.')
  rope_original_len: int = field(
    0, "Context length in tokens before RoPE scaling, which 'llama3' and 'yarn' require.", zero=True
  )
  rope_low: float = field(
    1.0,
    "RoPE scaling 'llama3' and 'yarn': frequencies with at most this many rotations in the original "
    'context are scaled by the full factor.',
  )
  rope_high: float = field(
    4.0,
    "RoPE scaling 'llama3' and 'yarn': frequencies with at least this many rotations in the original "
    'context are not scaled.',
  )
  rope_attention: float = field(
    0.0,
    "Factor of rotated queries and keys in RoPE scaling 'yarn'. 0 means 0.1 ln(rope_factor) + 1.",
    zero=True,
  )
  rope_local_base: float = field(
    0.0,
    'RoPE base of blocks with a sliding window, not scaled. 0 means the RoPE of other blocks.',
    zero=True,
  )
  no_rope_every: int = field(0, 'Every n-th block has no rotary embedding. 0 means that all blocks have it.', zero=True)
  block: str = field(
    '',
    "Your own transformer block, as 'package.module:name'. Empty means the built-in block.",
    extensible=True,
  )


@dataclasses.dataclass(frozen=True)
class Pretrain:
  """The base model, from which every path starts [2.6]."""

  steps: int = field(24_000, 'Number of training steps of the base model. 0 does not train it.', zero=True)
  batch_size: int = field(512, 'Number of rows per step in the training of the base model.')
  init: str = field(
    '',
    'Pretrained model to start from: a Hugging Face folder or Hub name. Empty means random initialization.',
  )
