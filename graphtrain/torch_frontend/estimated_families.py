"""Families of transformers whose sizes estimates read from config.json alone.

With their default settings, the native model that `native_equivalent` makes has the parameters of
the module within 5 %; tests/extras/torch_models/test_estimated_families.py counts them again.
"""

# Families whose MLP, or whose experts, have a gate: three matrices.
_GATED = """
    afmoe axk1 axk2 bailing_hybrid bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 diffllama dots3_note_text ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma4_unified_text
    glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hy_v3 hy_v4 hyperclovax
    inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder kimi_linear kolibri1
    laguna lara_mini lfm3 llama mellum mimo_v2_flash minicpm3 minimax minimax_m2
    minimax_m3_vl_text ministral3 mistral mixtral modernbert-decoder olmo olmo2 olmo3 olmoe
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_moe qwen3_next sarvam_mla
    sarvam_moe seed_oss smollm3 solar_open stablelm vaultgemma youtu zaya
"""

# Families whose MLP has two matrices.
_WITHOUT_GATE = """
    apertus apertus1p5_text arcee bert bert-generation big_bird biogpt bloom camembert
    codegen cpmant data2vec-text ernie falcon gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gptj jais2 lfm2 megatron-bert nanochat openai-gpt opt persimmon phi
    roberta roberta-prelayernorm roformer starcoder2 xlm-roberta xlm-roberta-xl xlstm
"""

GATED = frozenset(_GATED.split())
WITHOUT_GATE = frozenset(_WITHOUT_GATE.split())
