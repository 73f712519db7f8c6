"""Container images judged by their description, in the shapes that buildx prints."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from sm75.errors import UsageError
from sm75.images import asks_for_turing, read_images, table, to_json

# Arch lists of vLLM 0.33.0's release pipeline, per platform.
X86 = "7.5 8.0 8.6 8.9 9.0 10.0 12.0"
ARM = "8.0 8.7 8.9 9.0 10.0 11.0 12.0"


def image(arch: str, arches: str | None = None, **config: Any) -> dict[str, Any]:
    """An OCI image configuration, as vLLM's final stage leaves it."""
    built = [
        {"created_by": "/bin/sh -c #(nop) ADD file:0a1b in / ", "empty_layer": False},
        {"created_by": "WORKDIR /vllm-workspace", "comment": "buildkit.dockerfile.v0"},
        {"comment": "no created_by at all"},
    ]
    env = ["PATH=/usr/bin", "CUDA_VERSION=13.0.2", "NVIDIA_VISIBLE_DEVICES=all"]
    if arches is not None:
        env.append(f"TORCH_CUDA_ARCH_LIST={arches}")
        built += [
            {"created_by": f"ARG torch_cuda_arch_list={arches}", "empty_layer": True},
            {
                "created_by": f"RUN |3 CUDA_VERSION=13.0.2 torch_cuda_arch_list={arches}"
                " INSTALL_KV_CONNECTORS=false /bin/sh -c set -eu; true # buildkit"
            },
        ]
    return {
        "created": "2026-11-02T08:00:00Z",
        "architecture": arch,
        "os": "linux",
        "config": {"Env": env, "Labels": {"ai.vllm.build.commit": "abc"}, **config},
        "rootfs": {"type": "layers", "diff_ids": []},
        "history": built,
    }


def test_a_map_of_platforms() -> None:
    text = json.dumps({"linux/amd64": image("amd64", X86), "linux/arm64": image("arm64", ARM)})
    amd, arm = read_images(text)
    assert (amd.platform, amd.usable) == ("linux/amd64", False)
    assert amd.reason == "unusable on g5g, because: it is for linux/amd64, g5g is linux/arm64"
    assert (arm.platform, arm.usable, arm.cuda) == ("linux/arm64", False, "13.0.2")
    assert arm.reason == (
        f"unusable on g5g, because: no 7.5 in TORCH_CUDA_ARCH_LIST={ARM};"
        f" torch_cuda_arch_list={ARM}"
    )
    assert [(found.where, found.name, found.value) for found in arm.lists] == [
        ("env", "TORCH_CUDA_ARCH_LIST", ARM),
        ("history", "torch_cuda_arch_list", ARM),
    ]


def test_a_single_image() -> None:
    (report,) = read_images(json.dumps(image("arm64", X86)))
    assert report.platform == "linux/arm64"
    assert report.usable is True
    assert report.reason == "built for 7.5 as asked; inspect its libraries to be sure"


def test_variant_belongs_to_the_platform() -> None:
    (report,) = read_images(json.dumps({**image("arm64", ARM), "variant": "v8"}))
    assert report.platform == "linux/arm64/v8"
    assert "no 7.5" in report.reason


def test_no_list_is_no_verdict() -> None:
    (report,) = read_images(json.dumps(image("arm64")))
    assert report.usable is None
    assert report.lists == ()
    assert report.reason == "it names no arch list: pull it and inspect its libraries"


@pytest.mark.parametrize("config", [None, {"Env": None, "Labels": None}])
def test_bare_configurations(config: Any) -> None:
    data = {"architecture": "arm64", "os": "linux", "config": config, "history": None}
    assert read_images(json.dumps(data))[0].usable is None


def test_lists_that_disagree_are_no_verdict() -> None:
    labels = {"org.example.cuda_arch_list": X86}
    (report,) = read_images(json.dumps(image("arm64", ARM, Labels=labels)))
    assert report.usable is None
    assert [found.fits for found in report.lists] == [False, True, False]
    assert report.reason.startswith(
        f"its arch lists disagree, without 7.5: TORCH_CUDA_ARCH_LIST={ARM}"
    )


def test_attestations_are_passed_over() -> None:
    unknown = {"architecture": "unknown", "os": "unknown", "config": {}}
    text = json.dumps({"linux/arm64": image("arm64", ARM), "unknown/unknown": unknown})
    assert [report.platform for report in read_images(text)] == ["linux/arm64"]
    with pytest.raises(UsageError, match="not an image description"):
        read_images(json.dumps({"unknown/unknown": unknown}))


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (
            "ENV TORCH_CUDA_ARCH_LIST=5.2 6.0 7.0 7.5 8.0 8.6 9.0+PTX",
            "5.2 6.0 7.0 7.5 8.0 8.6 9.0+PTX",
        ),
        ("ARG torch_cuda_arch_list='7.5;8.0'", "7.5;8.0"),
        ("/bin/sh -c #(nop)  ENV TORCH_CUDA_ARCH_LIST=8.0 9.0a", "8.0 9.0a"),
        ('RUN TORCH_CUDA_ARCH_LIST="9.0a 10.0a" bash install.sh', "9.0a 10.0a"),
        ("RUN cmake -DCMAKE_CUDA_ARCHITECTURES=75-real;80 ..", "75-real;80"),
        ("RUN |2 torch_cuda_arch_list=9.0 10.0 max_jobs=16 /bin/sh -c make", "9.0 10.0"),
        ("ENV TORCH_CUDA_ARCH_LIST=${torch_cuda_arch_list}", None),
        ("RUN echo cuda_arch is not given", None),
    ],
)
def test_history_lines(line: str, value: str | None) -> None:
    data = {"architecture": "arm64", "os": "linux", "history": [{"created_by": line}]}
    (report,) = read_images(json.dumps(data))
    assert [found.value for found in report.lists] == ([value] if value else [])


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("7.5", True),
        ("8.0;7.5", True),
        ("7.0", True),
        ("7.0+PTX", True),
        ("5.2+PTX", True),
        ("5.2", False),
        ("8.0+PTX", False),
        ("9.0a", False),
        ("Turing", True),
        ("Turing+PTX", True),
        ("Ampere", False),
        ("75", True),
        ("52", True),
        ("52-real", False),
        ("52-virtual", True),
        ("75-real", True),
        ("80;90a", False),
        ("120", False),
        ("", False),
    ],
)
def test_arch_lists(value: str, fits: bool) -> None:
    assert asks_for_turing(value) is fits


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"a": 1}', '{"linux/arm64": {"config": {}}}', "Name: x"]
)
def test_other_input_is_refused_with_the_command(text: str) -> None:
    with pytest.raises(UsageError, match="imagetools inspect"):
        read_images(text)


def test_table_and_json() -> None:
    reports = read_images(json.dumps({"linux/arm64": image("arm64", ARM)}))
    out = io.StringIO()
    Console(file=out, width=220).print(table(reports, "vllm/vllm-openai:v0.33.0"))
    assert ARM in out.getvalue()
    assert "vllm/vllm-openai:v0.33.0" in out.getvalue()
    (data,) = json.loads(json.dumps(to_json(reports)))
    assert data["usable"] is False
    assert data["lists"][0] == {
        "where": "env",
        "name": "TORCH_CUDA_ARCH_LIST",
        "value": ARM,
        "fits": False,
    }
