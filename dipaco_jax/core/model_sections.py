"""Sections of the settings: the text, its tokenizer, the model of a path, and the base model."""

import dataclasses

from dipaco_jax.core.fields import Source, field


@dataclasses.dataclass(frozen=True)
class Data:
  """Source of documents."""

  source: str = field(
    'auto',
    "Kind of source of the text. 'auto' follows from the other fields: 'files' if data.train or data.validation is "
    "given, 'seqio' if data.module is, 'tfds' if data.name has a version, and otherwise 'stdlib', the source code and "
    'documentation of Python itself.',
    choices='auto files stdlib tfds seqio',
    extensible=True,
  )
  train: tuple[str | Source, ...] = field(
    (),
    'Globs of training files: .txt, .jsonl, .parquet, .arrow, .tar, .bin and others. For a mixture, tuples (name, '
    'globs, weight); weights are shares of the bytes of text.',
    example="('books/*.txt',)",
  )
  validation: tuple[str | Source, ...] = field(
    (),
    'Globs of validation files, or a mixture with the names of data.train. If empty, part of the text is held back '
    'for validation.',
    example="('books/*.txt',)",
  )
  name: str = field('', "Dataset and version of TFDS, such as 'c4/en:3.0.1', or a task or mixture of SeqIO.")
  data_dir: str = field('', 'Folder or gs:// URL in which TFDS has prepared its datasets. Optional for SeqIO.')
  module: str = field('', 'Python module to import; it must register the task or mixture of SeqIO.')
  validation_fraction: float = field(
    0.02, 'Fraction of the text that is held back for validation if the source has no validation split.', below=1
  )
  min_validation_tokens: int = field(
    1000,
    'Minimum number of validation tokens of each path; up to data.max_validation_fraction of the text is held back to '
    'reach it. 0 sets no minimum.',
    zero=True,
  )
  max_validation_fraction: float = field(
    0.1, 'Largest fraction of the text that may be held back to reach data.min_validation_tokens.', below=1
  )
  max_validation_documents: int = field(
    1000,
    'Maximum number of validation documents; if they are in files, a sample of all of them. 0 uses all.',
    zero=True,
  )
  max_documents: int = field(
    0, 'Maximum number of documents to read, including those that are held back for validation. 0 reads all.', zero=True
  )
  parts: int = field(
    1,
    'Number of parts in which the text is tokenized. Results depend on it, but not on the number of processes that '
    'share the parts.',
  )
  text_key: str = field('text', "Key of the text in a record. 'a.b' is key b of the object at key a.")
  domain_key: str = field(
    'domain',
    "Key of a document's domain in a record; perplexity is reported for each domain. Documents of files that lack it "
    'have the name of their folder or file.',
  )
  plain_suffixes: tuple[str, ...] = field(
    (), 'Further suffixes of files that are read as plain text.', example="('.py', '.log')", added=True
  )
  skip_bad_records: bool = field(
    False,
    'Leaves out and counts records that have no text or are not valid JSON or UTF-8. Otherwise such a record is an '
    'error.',
    may_change=True,
    added=True,
  )
  holdout_fraction: float = field(
    0.01, 'Fraction of the training documents that is held out for early stopping [2.7].', zero=True, below=1
  )


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A given tokenizer, or one trained on a seeded sample of the training text."""

  model_file: str = field(
    '',
    "Tokenizer to use: a SentencePiece .model file, such as T5's with 32,000 pieces, or a tokenizer.json. If empty, "
    'one is trained.',
  )
  kind: str = field(
    'sentencepiece',
    "Kind of tokenizer to train. 'sentencepiece' is a SentencePiece BPE model, 'bytes' is byte-level BPE.",
    choices='sentencepiece bytes',
    extensible=True,
    added=True,
  )
  vocab_size: int = field(32_000, 'Vocabulary size of the tokenizer to train.')
  sample_bytes: int = field(
    20_000_000, 'Size in bytes of the sample of the training text on which the tokenizer is trained.'
  )


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder-only transformer; the defaults are the 150M path of the paper [7.1], in Llama's shape."""

  width: int = field(896, 'Width of the residual stream.')
  num_layers: int = field(12, 'Number of transformer blocks.')
  num_heads: int = field(16, 'Number of attention heads.')
  head_dim: int = field(64, 'Size of each attention head; an even number.')
  mlp_dim: int = field(2432, 'Hidden width of the MLP.')
  seq_len: int = field(1024, 'Number of tokens in a training row. Longer documents are cut into several sequences.')
  tied: bool = field(True, 'Uses the transposed embedding as the output head.')
  dtype: str = field(
    'auto',
    "Data type of computation. 'auto' is float32 on CPUs and bfloat16 elsewhere. Parameters are always float32.",
    choices='auto float32 bfloat16',
  )
  attention: str = field(
    'auto',
    "Attention kernel. 'splash' runs on TPUs, 'flash' and 'cudnn' on GPUs, 'blocked' on CPUs, 'xla' anywhere. 'auto' "
    "is 'splash', 'flash' (or 'xla' on GPUs that do not support it) or 'blocked'.",
    choices='auto xla blocked flash cudnn splash',
  )
  product_dtype: str = field(
    'auto',
    "Data type in which products of bfloat16 matrices are computed before rounding. 'auto' is float32 on CPUs and "
    'bfloat16 elsewhere.',
    choices='auto float32 bfloat16',
    added=True,
  )
  layers: str = field(
    'auto',
    "How blocks are compiled. 'scanned' compiles repeated blocks once, but copies their matrices; 'unrolled' compiles "
    "each block. 'auto' is 'scanned' on TPUs and 'unrolled' elsewhere.",
    choices='auto scanned unrolled',
  )
  remat: str = field(
    'none',
    "Which activations are computed again in the backward pass. 'dots' keeps the results of matrix products and "
    "attention kernels, 'full' keeps only the inputs of blocks.",
    choices='none full dots',
  )
  loss_chunk: int = field(1024, 'Maximum number of tokens whose logits are in memory at one time.')
  vocab_chunk: int = field(
    0,
    'Maximum number of vocabulary entries whose logits are in memory at one time in inner steps. 0 means all.',
    zero=True,
    added=True,
  )
  rope_base: float = field(10_000.0, 'Base of the rotary position embedding.')
  norm_epsilon: float = field(1e-6, 'Epsilon of RMSNorm.')
  num_kv_heads: int = field(
    0,
    'Number of heads of keys and values; groups of query heads share them. It divides model.num_heads; 0 means '
    'model.num_heads.',
    zero=True,
    added=True,
  )
  qk_norm: str = field(
    'none',
    "RMSNorm of queries and keys: 'head' normalizes each head, 'all' all heads together.",
    choices='none head all',
    added=True,
  )
  qkv_bias: bool = field(False, 'Adds biases to queries, keys and values.', added=True)
  norms: str = field(
    'before',
    'Position of RMSNorm: before attention and MLP, after them, or both.',
    choices='before after both',
    added=True,
  )
  norm_from_one: bool = field(False, 'Scales RMSNorm by 1 plus its parameter.', added=True)
  activation: str = field(
    'silu', "Activation of the MLP's gate. 'gelu' is the tanh approximation.", choices='silu gelu', added=True
  )
  embed_scale: bool = field(False, 'Multiplies embeddings by sqrt(width).', added=True)
  query_scale: float = field(
    0.0,
    'Attention logits are divided by the square root of this number. 0 means model.head_dim.',
    zero=True,
    added=True,
  )
  attention_cap: float = field(
    0.0, 'Soft cap of attention logits: cap * tanh(logits / cap). 0 disables it.', zero=True, added=True
  )
  window: int = field(
    0,
    'Size of the sliding attention window in tokens, including the token itself. 0 means all earlier tokens.',
    zero=True,
    added=True,
  )
  full_every: int = field(
    0, 'Every n-th block attends to all earlier tokens in spite of model.window. 0 means none.', zero=True, added=True
  )
  rope_scaling: str = field(
    'none', 'Scaling of the rotary embedding for longer texts.', choices='none linear llama3 yarn', added=True
  )
  rope_factor: float = field(1.0, 'Factor by which RoPE scaling extends the context.', added=True)
  rope_original_len: int = field(
    0, "Context length in tokens before RoPE scaling; required by 'llama3' and 'yarn'.", zero=True, added=True
  )
  rope_low: float = field(
    1.0,
    "RoPE scaling 'llama3' and 'yarn': frequencies with fewer than this many rotations in the original context are "
    'scaled by the full factor.',
    added=True,
  )
  rope_high: float = field(
    4.0,
    "RoPE scaling 'llama3' and 'yarn': frequencies with more than this many rotations in the original context are not "
    'scaled.',
    added=True,
  )
  rope_attention: float = field(
    0.0,
    "Factor of rotated queries and keys with RoPE scaling 'yarn'. 0 means 0.1 ln(model.rope_factor) + 1.",
    zero=True,
    added=True,
  )
  rope_local_base: float = field(
    0.0,
    'Base of the rotary embedding in blocks with a window, without scaling. 0 means as in the other blocks.',
    zero=True,
    added=True,
  )
  no_rope_every: int = field(
    0, 'Every n-th block has no rotary embedding. 0 means that all blocks have it.', zero=True, added=True
  )
  block: str = field(
    '',
    "Your own transformer block, as 'package.module:name' (docs/extend.md). If empty, the built-in block.",
    extensible=True,
    added=True,
  )


@dataclasses.dataclass(frozen=True)
class Pretrain:
  """The base model, from which every path starts [2.6]."""

  steps: int = field(
    24_000,
    'Number of training steps of the base model, from which all paths start [2.6]. 0 does not train it.',
    zero=True,
  )
  batch_size: int = field(512, 'Number of rows in a batch of the base model.')
  init: str = field(
    '',
    'Model to start the base from: a folder in Hugging Face format, or a name on the Hub. If empty, random parameters.',
  )
