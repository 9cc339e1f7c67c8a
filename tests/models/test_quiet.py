"""Reading a model draws nothing over the lines of a log."""

from transformers import modeling_gguf_pytorch_utils

from pykv.models.quiet import without_gguf_bar


def test_a_gguf_file_is_read_without_a_bar(capsys):
    before = modeling_gguf_pytorch_utils.tqdm
    with without_gguf_bar():
        assert list(modeling_gguf_pytorch_utils.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert modeling_gguf_pytorch_utils.tqdm is before
