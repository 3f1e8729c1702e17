"""Sections of the settings: the text, its tokenizer, the model of a path, and the base model."""

import dataclasses

from dipaco_jax.core.fields import Source, field


@dataclasses.dataclass(frozen=True)
class Data:
  """Source of documents."""

  source: str = field(
    'auto',
    "Kind of source of the text. 'auto' follows from the other fields: 'files' if train or validation are"
    " given, 'seqio' or 'tfds' if name is, otherwise 'stdlib', the source code and documentation of "
    'Python itself.',
    choices='auto files stdlib tfds seqio',
    extensible=True,
  )
  train: tuple[str | Source, ...] = field(
    (),
    'Globs of training files: .txt, .jsonl, .parquet, .arrow, .tar, .bin and others. For a mixture, '
    'tuples (name, globs, weight).',
    example="('books/*.txt',)",
  )
  validation: tuple[str | Source, ...] = field(
    (), 'Globs of validation files. If empty, part of the text is held back for validation.', example="('books/*.txt',)"
  )
  name: str = field('', "Dataset and version of TFDS, such as 'c4/en:3.0.1', or a task or mixture of SeqIO.")
  data_dir: str = field('', 'Folder in which TFDS has prepared its datasets; may be a gs:// URL.')
  module: str = field('', 'Python module to import; it must register the SeqIO task.')
  validation_fraction: float = field(
    0.02, 'Fraction of the text that is held back for validation if the source has no validation split.', below=1
  )
  min_validation_tokens: int = field(
    1000,
    'Minimum number of validation tokens of each path; more text is held back to reach it. 0 sets no minimum.',
    zero=True,
  )
  max_validation_fraction: float = field(
    0.1, 'Largest fraction of the text that may be held back to reach min_validation_tokens.', below=1
  )
  max_validation_documents: int = field(
    1000, 'Number of validation documents, drawn from all of them. 0 uses all.', zero=True
  )
  max_documents: int = field(
    0, 'Number of documents to read, training and validation together, from the first on. 0 reads all.', zero=True
  )
  parts: int = field(
    1, 'Number of parts in which the text is tokenized, by as many processes as there are. The result depends on it.'
  )
  text_key: str = field('text', "Key of the text in a record. 'a.b' is key b of the object at key a.")
  domain_key: str = field('domain', "Key of a document's domain in a record. Perplexity is reported for each domain.")
  plain_suffixes: tuple[str, ...] = field(
    (), 'Further suffixes of files that are read as plain text.', example="('.py', '.log')"
  )
  skip_bad_records: bool = field(
    False,
    'Leaves out and counts records that have no text or are not valid JSON or UTF-8. Otherwise such a '
    'record is an error.',
    may_change=True,
  )
  holdout_fraction: float = field(
    0.01, "Fraction of each shard's documents that is held out for early stopping [2.7].", zero=True, below=1
  )


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A given tokenizer, or one trained on a seeded sample of the training text."""

  model_file: str = field(
    '',
    "Tokenizer to use: a SentencePiece .model file, such as T5's with 32,000 pieces, or a tokenizer.json."
    ' If empty, one is trained.',
  )
  kind: str = field(
    'sentencepiece',
    "Kind of tokenizer to train. 'bytes' is byte-level BPE.",
    choices='sentencepiece bytes',
    extensible=True,
  )
  vocab_size: int = field(32_000, 'Vocabulary size of the tokenizer to train.')
  sample_bytes: int = field(20_000_000, 'Bytes of text on which the tokenizer is trained.')


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer; the defaults are the 150M path of the paper [7.1], in Llama's shape."""

  width: int = field(896, 'Width of the residual stream.')
  num_layers: int = field(12, 'Number of transformer blocks.')
  num_heads: int = field(16, 'Number of attention heads.')
  head_dim: int = field(64, 'Size of each attention head; an even number.')
  mlp_dim: int = field(2432, 'Hidden width of the MLP.')
  seq_len: int = field(1024, 'Number of tokens in a training row.')
  tied: bool = field(True, 'Uses the transposed embedding as the output head.')
  dtype: str = field(
    'auto',
    "Data type of computation. 'auto' is float32 on CPUs and bfloat16 elsewhere. Parameters are always float32.",
    choices='auto float32 bfloat16',
  )
  attention: str = field(
    'auto',
    "Attention kernel. 'splash' runs on TPUs, 'flash' and 'cudnn' on GPUs, 'blocked' on CPUs, 'xla' anywhere.",
    choices='auto xla blocked flash cudnn splash',
  )
  product_dtype: str = field(
    'auto',
    "Data type in which bfloat16 matrix products are accumulated. 'auto' is float32 on CPUs.",
    choices='auto float32 bfloat16',
  )
  layers: str = field(
    'auto',
    "How blocks are compiled. 'scanned' compiles one block for all, 'unrolled' each of them; 'auto' chooses.",
    choices='auto scanned unrolled',
  )
  remat: str = field(
    'none',
    "Which activations are computed again in the backward pass. 'dots' keeps the results of matrix "
    "products and attention kernels, 'full' keeps only the inputs of blocks.",
    choices='none full dots',
  )
  loss_chunk: int = field(1024, 'Number of tokens whose logits are in memory at one time.')
  vocab_chunk: int = field(
    0,
    'Number of vocabulary entries whose logits are in memory at one time during inner steps. 0 means all.',
    zero=True,
  )
  rope_base: float = field(10_000.0, 'Base of the rotary position embedding.')
  norm_epsilon: float = field(1e-6, 'Epsilon of RMSNorm.')
  num_kv_heads: int = field(
    0, 'Number of heads of keys and values; each serves as many query heads. 0 means num_heads.', zero=True
  )
  qk_norm: str = field(
    'none',
    "RMSNorm of queries and keys: 'head' normalizes each head, 'all' all heads together.",
    choices='none head all',
  )
  qkv_bias: bool = field(False, 'Adds biases to queries, keys and values.')
  norms: str = field('before', 'Position of RMSNorm relative to attention and MLP.', choices='before after both')
  norm_from_one: bool = field(False, 'Scales RMSNorm by 1 plus its parameter.')
  activation: str = field(
    'silu', "Activation of the MLP's gate. 'gelu' is the tanh approximation.", choices='silu gelu'
  )
  embed_scale: bool = field(False, 'Multiplies embeddings by sqrt(width).')
  query_scale: float = field(
    0.0, 'Attention logits are divided by the square root of this number. 0 means head_dim.', zero=True
  )
  attention_cap: float = field(0.0, 'Soft cap of attention logits: cap * tanh(logits / cap). 0 disables it.', zero=True)
  window: int = field(
    0, 'Number of tokens that a token attends to, itself included. 0 means all tokens before it.', zero=True
  )
  full_every: int = field(0, 'Every n-th block attends to all tokens in spite of window. 0 means none.', zero=True)
  rope_scaling: str = field(
    'none', 'Scaling of the rotary embedding for longer texts.', choices='none linear llama3 yarn'
  )
  rope_factor: float = field(1.0, 'Factor by which RoPE scaling extends the context.')
  rope_original_len: int = field(
    0, "Context length, in tokens, before RoPE scaling; for 'llama3' and 'yarn'.", zero=True
  )
  rope_low: float = field(
    1.0,
    'RoPE scaling: frequencies with fewer than this many rotations in the original context are scaled by '
    'the full factor.',
  )
  rope_high: float = field(
    4.0,
    'RoPE scaling: frequencies with more than this many rotations in the original context are not scaled.',
  )
  rope_attention: float = field(0.0, "YaRN's factor for queries and keys. 0 means 0.1 ln(rope_factor) + 1.", zero=True)
  rope_local_base: float = field(
    0.0,
    'Base of the rotary embedding in blocks with a window, without scaling. 0 means as in the other blocks.',
    zero=True,
  )
  no_rope_every: int = field(0, 'Every n-th block has no rotary embedding. 0 means that all blocks have it.', zero=True)
  block: str = field(
    '',
    "Your own transformer block, as 'package.module:name' (docs/extend.md). If empty, the built-in block.",
    extensible=True,
  )


@dataclasses.dataclass(frozen=True)
class Pretrain:
  """The base model, from which every path starts [2.6]."""

  steps: int = field(24_000, 'Number of AdamW steps of the base model, from which all paths start [2.6].', zero=True)
  batch_size: int = field(512, 'Number of rows in a batch of the base model.')
  init: str = field(
    '',
    'Model to start the base from: a folder in Hugging Face format, or a name on the Hub. If empty, random parameters.',
  )
