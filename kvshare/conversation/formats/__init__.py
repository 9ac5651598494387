"""Reads tool calls from the text of an answer: one reader for each format in which models write them."""

from collections.abc import Mapping

from kvshare.conversation.formats.json_calls import HermesReader, Llama3Reader, MistralReader
from kvshare.conversation.formats.qwen_xml import QwenXmlReader
from kvshare.conversation.formats.reader import CallReader
from kvshare.conversation.tools import ToolFormat

READERS: Mapping[ToolFormat, type[CallReader]] = {
    ToolFormat.HERMES: HermesReader,
    ToolFormat.LLAMA3_JSON: Llama3Reader,
    ToolFormat.MISTRAL: MistralReader,
    ToolFormat.QWEN_XML: QwenXmlReader,
}
