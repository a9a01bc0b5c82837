"""Chat templates in published styles, written for the tests: their special tokens and layout, nothing else of the originals.

STYLES: {name: Style}. A style's tokenizer has one token per byte and one per special token.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Style:
    """A chat template; special: its special tokens, the tokenizer's end token first."""

    template: str
    special: tuple


def byte_tokenizer(template, special):
    """A tokenizer of one token per byte, and of these special tokens, the end token first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*special, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        bos_token=next((token for token in special if token in ("<s>", "<bos>", "<|begin_of_text|>")), None),
        additional_special_tokens=list(special[1:]),
        chat_template=template,
    )


CHATML = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_2 = """
{%- set told = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if told else messages) %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {%- if m.role == 'user' %}{{ bos_token ~ '[INST] ' ~ (told if loop.first else '') ~ m.content | trim ~ ' [/INST]' }}
  {%- else %}{{ ' ' ~ m.content | trim ~ ' ' ~ eos_token }}{% endif %}
{%- endfor %}"""

LLAMA_3 = """
{{- bos_token }}
{%- for m in messages %}
  {{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL_1 = """
{{- bos_token }}
{%- for m in messages %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% else %}{{ m.content ~ eos_token }}{% endif %}
{%- endfor %}"""

# The system prompt and the tools stand before the last request: a later turn moves them.
MISTRAL_3 = """
{%- set told = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if told else messages %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list | length %}
{%- set seen = namespace(users=0) %}
{{- bos_token }}
{%- for m in turns %}
  {%- if m.role == 'user' %}
    {%- set seen.users = seen.users + 1 %}
    {%- if tools and seen.users == asked %}{{ '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST] ' ~ (told ~ '\\n\\n' if told and seen.users == asked else '') ~ m.content ~ '[/INST]' }}
  {%- elif m.tool_calls %}{{ '[TOOL_CALLS] ' ~ m.tool_calls | map(attribute='function') | list | tojson ~ eos_token }}
  {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' ~ {'content': m.content} | tojson ~ '[/TOOL_RESULTS]' }}
  {%- else %}{{ ' ' ~ m.content | trim ~ eos_token }}
  {%- endif %}
{%- endfor %}"""

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{%- for m in messages %}
  {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ m.content | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PHI_3 = """
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

_QWEN_HEAD = """
{%- set told = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or told %}
  {{- '<|im_start|>system\\n' ~ told }}
  {%- if tools %}{{ '\\n<tools>\\n' }}{% for tool in tools %}{{ tool | tojson ~ '\\n' }}{% endfor %}{{ '</tools>' }}{% endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}"""
_QWEN_TURNS = """
  {%- for call in m.tool_calls or [] %}
    {{- '\\n' if not loop.first or m.content }}
    {{- '<tool_call>\\n' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
    {{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
    {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
  {%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' ~ m.content ~ '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}"""
QWEN_25 = f"""{_QWEN_HEAD}
{{%- for m in messages %}}
  {{%- if m.role == 'assistant' %}}{{{{ '<|im_start|>assistant\\n' ~ m.content }}}}{_QWEN_TURNS}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""

# Thoughts stand in answers after the last request only, and the generation prompt opens them.
QWEN_3 = f"""{_QWEN_HEAD}
{{%- set last = namespace(user=0) %}}
{{%- for m in messages %}}{{% if m.role == 'user' %}}{{% set last.user = loop.index0 %}}{{% endif %}}{{% endfor %}}
{{%- for m in messages %}}
  {{%- if m.role == 'assistant' %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- set thoughts = m.reasoning_content or '' %}}
    {{%- if loop.index0 > last.user %}}{{{{ '<think>\\n' ~ thoughts.strip() ~ '\\n</think>\\n\\n' }}}}{{% endif %}}
    {{{{- m.content.split('</think>')[-1].lstrip('\\n') }}}}{_QWEN_TURNS}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n<think>\\n' }}}}{{% endif %}}"""

# The generation prompt opens thoughts, which finished answers lose.
DEEPSEEK = """
{%- for m in messages %}
  {%- if m.role == 'system' %}{{ m.content }}
  {%- elif m.role == 'user' %}{{ '<|User|>' ~ m.content }}
  {%- else %}{{ '<|Assistant|>' ~ m.content.split('</think>')[-1] ~ eos_token }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

ZEPHYR = """
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ eos_token ~ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

VICUNA = """
{%- for m in messages %}
  {%- if m.role == 'system' %}{{ m.content ~ ' ' }}
  {%- elif m.role == 'user' %}{{ 'USER: ' ~ m.content ~ ' ' }}
  {%- else %}{{ 'ASSISTANT: ' ~ m.content ~ eos_token }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

COMMAND_R = """
{%- for m in messages %}
  {%- set role = {'assistant': 'CHATBOT'}.get(m.role, m.role | upper) %}
  {{- '<|START_OF_TURN_TOKEN|><|' ~ role ~ '_TOKEN|>' ~ m.content | trim ~ '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

# Channels. The last message of a conversation closes with another token than earlier ones.
HARMONY = """
{{- '<|start|>system<|message|>Date: ' ~ strftime_now('%Y-%m-%d') ~ '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>' ~ tools | tojson ~ '<|end|>' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- if m.thinking and loop.last %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{% endif %}
    {%- if m.tool_calls %}
      {%- set call = m.tool_calls[0].function %}
      {{- '<|start|>assistant to=' ~ call.name ~ '<|channel|>commentary<|message|>' ~ call.arguments | tojson ~ '<|call|>' }}
    {%- else %}
      {{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}
      {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- endif %}
  {%- else %}{{ '<|start|>' ~ m.role | replace('system', 'developer') ~ '<|message|>' ~ m.content ~ '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

SMOLLM = """
{%- for m in messages %}
  {{- '<|im_start|>' ~ m.role ~ '\\n' }}
  {%- if m.role == 'assistant' %}
    {%- generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
  {%- else %}{{ m.content ~ '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Today's date stands in every system turn.
LLAMA_31 = """
{{- bos_token ~ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' ~ strftime_now("%d %b %Y") ~ '\\n\\n' }}
{%- set told = messages[0].role == 'system' %}
{{- (messages[0].content | trim if told) ~ '<|eot_id|>' }}
{%- for m in (messages[1:] if told else messages) %}
  {%- set role = 'ipython' if m.role == 'tool' else m.role %}
  {{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' }}
  {%- if tools and m.role == 'user' and loop.first %}{{ tools | tojson ~ '\\n\\n' }}{% endif %}
  {%- if m.tool_calls %}
    {%- set call = m.tool_calls[0].function %}
    {{- {'name': call.name, 'parameters': call.arguments} | tojson ~ '<|eot_id|>' }}
  {%- else %}{{ m.content | trim ~ '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_IM = ("<|im_end|>", "<|im_start|>")
_MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_TURN = ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
_CHANNEL = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")

STYLES = {
    "ChatML": Style(CHATML, _IM),
    "Llama-2": Style(LLAMA_2, ("</s>", "<s>")),
    "Llama-3": Style(LLAMA_3, _LLAMA),
    "Llama-3.1, dated": Style(LLAMA_31, _LLAMA),
    "Mistral v0.1": Style(MISTRAL_1, ("</s>", "<s>")),
    "Mistral v0.3": Style(MISTRAL_3, ("</s>", "<s>", *_MISTRAL)),
    "Gemma": Style(GEMMA, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")),
    "Phi-3": Style(PHI_3, ("<|endoftext|>", "<|end|>", *_ROLES)),
    "Qwen2.5": Style(QWEN_25, _IM),
    "Qwen3-Thinking": Style(QWEN_3, _IM),
    "DeepSeek-R1-Distill": Style(DEEPSEEK, ("<|end_of_sentence|>", "<|User|>", "<|Assistant|>")),
    "Zephyr": Style(ZEPHYR, ("</s>", "<s>")),
    "Vicuna": Style(VICUNA, ("</s>", "<s>")),
    "Command-R": Style(COMMAND_R, ("<|END_OF_TURN_TOKEN|>", *_TURN)),
    "Harmony": Style(HARMONY, _CHANNEL),
    "SmolLM, with markers": Style(SMOLLM, _IM),
}
