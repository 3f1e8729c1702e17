"""Keys of config.json that do not change what a model computes: marks of tools, token ids, generation. Pure."""

MARKS = frozenset(
  'model_type vocab_size transformers_version torch_dtype dtype use_cache initializer_range pretraining_tp '
  'max_position_embeddings model_max_length max_sequence_length cache_implementation name_or_path model_name_or_path '
  'base_model_name_or_path finetuned_from is_llama_config is_decoder id2label label2id num_labels problem_type '
  'return_dict use_return_dict output_attentions output_hidden_states tokenizer_class processor_class prefix '
  'finetuning_task task_specific_params torchscript use_bfloat16 tf_legacy_loss attn_implementation '
  'attn_implementation_internal use_flash_attn gradient_checkpointing transformers.js_config unsloth_version '
  'unsloth_fixed license library_name tags dipaco_jax'.split()
)
# Of generation, which older versions of transformers keep in config.json.
GENERATION = frozenset(
  'max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty '
  'temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size '
  'encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate '
  'remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens'.split()
)
ENDINGS = ('_token_id', '_token_ids')
PRIVATE = '_'  # transformers' own notes, as _name_or_path; a tool's, as _model_name_or_path


def is_silent(name: str) -> bool:
  """Returns whether no value of a key changes what a model computes."""
  return name in MARKS or name in GENERATION or name.startswith(PRIVATE) or name.endswith(ENDINGS)
