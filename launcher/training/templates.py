"""Jinja chat templates that travel with the model: plain chat, and `reranker` for servers and libraries.

`reranker` renders the published prompt of the model's kind of reranker from messages of the roles system (optional: the
instruction), query and document, whose content is a text or a list of {"type": "text"|"image"|"video"} items. It
always ends with the assistant's turn, where the score is read, also for servers that forget to ask for it; an
instruction may come as the template variable `instruction` too.
"""

from __future__ import annotations

import json

from launcher.training.prompts import STYLES, SYSTEM

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

# Whitespace is trimmed at every tag and newlines stand in strings, so that no Jinja setting changes the prompt.
CHAT_TEMPLATE = (
    """
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for item in message.content -%}
      {%- if item.type == 'image' -%}{{- 'IMAGE' -}}
      {%- elif item.type == 'video' -%}{{- 'VIDEO' -}}
      {%- else -%}{{- item.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()
    .replace("IMAGE", IMAGE)
    .replace("VIDEO", VIDEO)
)

_RERANKER = """
{%- macro render(content) -%}
  {%- set shown -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for item in content if item.type == 'video' -%}{{- 'VIDEO' -}}{%- endfor -%}
    {%- for item in content if item.type == 'image' -%}{{- 'IMAGE' -}}{%- endfor -%}
    {%- for item in content if item.type == 'text' -%}{{- item.text -}}{%- endfor -%}
  {%- endif -%}
  {%- endset -%}
  {{- shown if shown else EMPTY -}}
{%- endmacro -%}
{%- macro plain(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}{%- for item in content if item.type == 'text' -%}{{- item.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set part = namespace(instruction=instruction if instruction else DEFAULT, query=none, document=none) -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{%- set part.instruction = plain(message.content) -%}
  {%- elif message.role == 'query' -%}{%- set part.query = render(message.content) -%}
  {%- elif message.role == 'document' -%}{%- set part.document = render(message.content) -%}
  {%- endif -%}
{%- endfor -%}
{%- if part.query is none or part.document is none -%}
  {{- raise_exception('the reranker template needs one message of role query and one of role document') -}}
{%- endif -%}
{{- '<|im_start|>system\\n' + SYSTEM + '<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' + part.instruction -}}
{{- BEFORE_QUERY + part.query + BEFORE_DOCUMENT + part.document + '<|im_end|>\\n<|im_start|>' + ANSWER -}}
""".strip()


def reranker_template(instruction: str, style: str = "vl") -> str:
    """The `reranker` template of a prompt style with `instruction` (the one trained with) as its default."""
    form = STYLES[style]
    words = {"SYSTEM": SYSTEM, "EMPTY": form.empty, "BEFORE_QUERY": form.query, "BEFORE_DOCUMENT": form.document}
    words |= {"ANSWER": form.answer, "DEFAULT": instruction}
    text = _RERANKER.replace("IMAGE", IMAGE).replace("VIDEO", VIDEO)
    for word, value in words.items():  # the instruction last: it may hold any word. Jinja reads JSON's escapes
        text = text.replace(word, json.dumps(value, ensure_ascii=False))
    return text
