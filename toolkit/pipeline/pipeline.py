"""The Python API: ``pipeline(model)`` gives an object that answers prompts. LMDeploy's names, signatures and defaults.

from toolkit import pipeline, GenerationConfig
with pipeline("demo") as pipe:
    print(pipe("What is the capital of France?").text)
    for piece in pipe.stream_infer(["One.", "Two."], gen_config=GenerationConfig(max_new_tokens=8)):
        print(piece.index, piece.text)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.progress import Progress
from toolkit.chat import settings
from toolkit.chat.messages import Message
from toolkit.chat.renderer import Renderer
from toolkit.chat.template import ChatTemplate
from toolkit.configs.engine import EngineConfig, PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
from toolkit.configs.lmdeploy import OPTIONS, notice
from toolkit.configs.speculative import SpeculativeConfig
from toolkit.engine.load.setup import Packed
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import UsageError
from toolkit.messages import ChatTemplateConfig, GenerationConfig, Response
from toolkit.pipeline import arguments
from toolkit.pipeline.embedder import Embedder
from toolkit.pipeline.jobs import Job, JobRunner, jobs_of, shape, turn
from toolkit.pipeline.prompts import Prompt, as_batch
from toolkit.pipeline.reader import Reader
from toolkit.pipeline.session import Session
from toolkit.vision.fetch import Fetching
from toolkit.vision.images import Rules, as_url
from toolkit.vision.sampling import media_sampling

if TYPE_CHECKING:
    from toolkit.artifacts.weight_files.new_weight_files import Weights
    from toolkit.serve.http.limits import Limits
    from toolkit.serve.openai.batches.loop import Tally

__all__ = ["Pipeline", "Session", "pipeline"]

logger = logging.getLogger("toolkit")
GenConfigs = GenerationConfig | list[GenerationConfig] | None


class Pipeline:
    """One loaded model with its chat template. Usable from several threads; a context manager.

    model_path: local directory, hub id, .gguf file, engine artifact or "demo". backend_config: None lets the
    toolkit choose. chat_template_config: a ChatTemplateConfig, a built-in name, or a .json or .jinja file.
    log_level: of the logger "toolkit"; INFO shows every prompt after templating, cut to ``max_log_len`` characters.
    gen_config: the default of all calls (else: what the model's generation_config.json asks for, or greedy);
    adapter_name too. backend: "turbomind" or "pytorch", in place of a backend_config. vision_config: how pictures are
    encoded. media_io_kwargs: as vLLM has it (``{"video": {"num_frames": …, "fps": …}}``). allowed_media_domains: the
    only hosts that images and videos are fetched from, None: any; allow_private_media: from addresses that are not
    public too. trust_remote_code: a model's own code is never run, whatever it says. progress: called with each line
    about loading, which otherwise is logged. packed: as for ``AsyncEngine.open``. kwargs: none; a name of older
    releases is answered with the new one.

    Raises UsageError for arguments that mean nothing, ToolkitError when the model cannot be loaded.
    """

    def __init__(
        self,
        model_path: str,
        backend_config: EngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | str | None = None,
        log_level: str = "WARNING",
        max_log_len: int | None = None,
        speculative_config: SpeculativeConfig | None = None,
        *,
        gen_config: GenerationConfig | None = None,
        adapter_name: str | None = None,
        backend: Literal["turbomind", "pytorch"] | None = None,
        vision_config: VisionConfig | None = None,
        media_io_kwargs: dict[str, Any] | str | None = None,
        allowed_media_domains: Sequence[str] | None = None,
        allow_private_media: bool = False,
        trust_remote_code: bool = False,
        progress: Callable[[str], None] | None = None,
        packed: Packed | None = None,
        **kwargs: Any,
    ) -> None:
        self.adapter_name = adapter_name
        vision = vision_config or VisionConfig()
        fetching, sampling = Fetching.of(allowed_media_domains, allow_private_media), media_sampling(media_io_kwargs)
        rules = Rules(fetching=fetching, sampling=sampling)
        arguments.refuse_unknown("pipeline()", kwargs)
        arguments.check(speculative_config, gen_config, max_log_len, vision)
        ChatTemplate.check(chat_template_config)
        arguments.set_log_level(logger, log_level)
        if trust_remote_code:
            logger.warning("%s", notice(OPTIONS["trust_remote_code"], "trust_remote_code"))
        if speculative_config is not None:
            kind = PytorchEngineConfig if backend == "pytorch" else TurbomindEngineConfig
            backend_config = replace(backend_config or kind(), **speculative_config.fields())
        self.model_path = str(model_path)
        self._named_template = chat_template_config
        self._closed = False
        renderer = Renderer()
        renderer.start()  # it comes up while the model loads
        self.engine = AsyncEngine.open(
            self.model_path,
            backend_config=backend_config,
            backend=backend,
            process=getattr(backend_config, "enable_mp_engine", False) is True,
            progress=progress,
            packed=packed,
            pictures_together=vision.max_batch_size,
            watched=False,
        )
        if self.engine.runner_why:
            (progress or logger.warning)(self.engine.runner_why)
        if self.engine.runner_note:
            logger.info("%s", self.engine.runner_note)
        try:
            self._adapter()
            self.reader = Reader.open(self.engine, self.model_path, chat_template_config, renderer, rules, max_log_len)
            if (forgery := self.chat_template.forgery) is not None:
                logger.info("chat template (%s): %s", self.chat_template.note, forgery)
            self.gen_config: GenerationConfig = gen_config or settings.of_model(self.tokenizer.path)
        except BaseException:
            self.engine.close()
            raise
        self._of_model = self.gen_config if gen_config is None else None
        if gen_config is None:
            logger.info("sampling where a call says nothing of it: %s", settings.describe(self.gen_config))
        self._runner = JobRunner(self.engine)
        self._embedder = Embedder(self.tokenizer, self.chat_template, self._runner)
        self._warned: set[str] = set()

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's, or the one asked for (``render``, ``encode``)."""
        return self.reader.template

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (``encode``, ``decode``)."""
        return self.engine.tokenizer

    def infer(
        self,
        prompts: Prompt | list[Prompt],
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        use_tqdm: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Answer prompts: one Response for one prompt, a list in input order for a list.

        prompts: text, (text, images) or (images, text), OpenAI messages, or a list of these; an image is a URL, a path
        or a Pillow image, and stands before or behind the text as the pair has it.
        gen_config: one for all, or a list with one a prompt; with
        ``n`` > 1 a prompt's result is the list of its n Responses, choice i drawn with ``random_seed + i``.
        do_preprocess=False takes texts as they are, without chat template. use_tqdm shows progress on standard error.
        ``adapter_name``: one of the engine config's ``adapters``, None for the plain model.
        kwargs: ``tools`` and ``chat_template_kwargs``, which go to the chat template. A request that fails gives a
        Response with finish_reason "error" and an error_message; the others are not touched. A prompt that fills the
        session gives an empty one with finish_reason "length", the error_message saying so.
        """
        batch, single = as_batch(prompts)
        jobs = self._jobs(batch, gen_config, do_preprocess, adapter_name, None, kwargs)
        with Progress(keep=True) if use_tqdm else nullcontext() as bar:
            found = {}
            for i, answer in self._runner.answers(jobs):
                found[i] = answer
                if bar:
                    bar.update("answers", len(found), len(jobs))
        return shape([found[i] for i in range(len(jobs))], len(batch), single, jobs)

    __call__ = infer
    batch_infer = infer  # an older name

    async def async_batch_infer(
        self,
        prompts: Prompt | list[Prompt],
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """``infer`` for asyncio, kwargs too; cancelling it stops the requests."""
        batch, single = as_batch(prompts)
        jobs = self._jobs(batch, gen_config, do_preprocess, adapter_name, None, kwargs)
        return shape(await self._runner.gather(jobs), len(batch), single, jobs)

    def stream_infer(
        self,
        prompts: Prompt | list[Prompt],
        sessions: Session | list[Session] | None = None,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        stream_response: bool = True,
        **kwargs: Any,
    ) -> Iterator[Response]:
        """Yield what is new of each answer as it comes, ``index`` saying whose; ``Response.extend`` joins pieces.

        stream_response=False yields each answer once, when it is whole. sessions: one, or one a prompt; their history
        precedes the prompt, and is left as it is. kwargs: as of ``infer``. Leaving the loop stops what still runs.
        """
        batch, _ = as_batch(prompts)
        before = arguments.sessions(sessions, len(batch))
        jobs = self._jobs(batch, gen_config, do_preprocess, adapter_name, before, kwargs)
        if any(job.key[1] for job in jobs):
            raise UsageError("n: expected 1 when streaming, found more; use infer for several choices")
        return self._runner.streamed(jobs) if stream_response else (answer for _, answer in self._runner.answers(jobs))

    def chat(
        self,
        prompt: str | tuple[Any, ...],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: str | None = None,
        **kwargs: Any,
    ) -> Session | Iterator[Response]:
        """One turn of a conversation: the session, updated, or with stream_response an iterator over the answer.
        ``prompt``: text, (text, images) or (images, text); kwargs: as of ``infer``.

        The turn enters the history when its answer ends; what was read of a stream that is left early counts too.
        An answer that fails (``session.response.finish_reason == "error"``) leaves the history as it was.
        """
        if not isinstance(prompt, str | tuple):
            raise UsageError(f"prompt: expected text or (text, images), found {type(prompt).__name__}")
        asked: Prompt = prompt if isinstance(prompt, str) else as_batch(prompt)[0][0]
        session = self.session() if session is None else session
        if session.closed:
            raise UsageError("session: it is closed; start another with pipe.session()")
        if gen_config is not None:
            session.gen_config = gen_config
        jobs = self._jobs([asked], session.gen_config, True, adapter_name, [session], kwargs)
        if len(jobs) > 1:
            raise UsageError("n: expected 1 in a conversation, found more")
        pieces = turn(session, prompt, self._runner.streamed(jobs))
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return session

    def session(self) -> Session:
        """A new conversation."""
        self._check_open()
        return Session(on_abort=self._runner.abort, on_close=self.stop_session)

    def stop_session(self, session: Session) -> None:
        """Stop what runs for a session and free the KV cache it keeps."""
        self._runner.abort(session)
        if not self._closed:
            self.engine.end_session(session.session_id)

    def context(self, messages: list[Message]) -> tuple[int, int]:
        """(tokens that a conversation takes once templated, tokens that fit). Raises ToolkitError."""
        return self.reader.count(messages), self.engine.session_len

    def longer(self) -> str:
        """What helps a user of the command line whose conversation does not fit."""
        return self.engine.plan.longer("--session-len", "--rope-scaling-factor")

    def checked_image(self, source: str) -> str:
        """The URL by which messages may name the picture in a file or at a URL: of a file one that holds it. Raises
        UsageError where it cannot be read, or the model reads text alone."""
        if self.reader.eyes is None:
            mend = "leave out --disable-vision-encoder" if self.engine.blind else "load a model that sees"
            raise UsageError(f"image: {self.model_path} reads text alone; {mend}")
        return as_url(source, self.reader.eyes.rules)

    def checked_video(self, source: str) -> str:
        """Likewise of a video, which is not decoded yet."""
        if self.reader.eyes is None or self.reader.eyes.recipe.video is None:
            raise UsageError(f"video: {self.model_path} takes no videos; load a model that does, or show it images")
        from toolkit.vision.videos import video_url

        return video_url(source)

    def get_ppl(self, input_ids: list[int] | list[list[int]]) -> list[float]:
        """Mean cross-entropy (natural logarithm, not exponentiated) of each sequence of at least two token ids."""
        self._check_open()
        many = arguments.id_rows(input_ids, self.tokenizer.vocab_size)
        return [-float(self.engine.score(ids).mean()) for ids in many]

    def get_embeddings(
        self,
        inputs: str | list[str] | list[int] | list[list[int]],
        pooling: str = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        adapter_name: str | None = None,
    ) -> NDArray[np.float32]:
        """One vector an input, float32 [inputs, hidden]: the last hidden state of its first or last token or the mean
        of all, through the layers that the model's sentence-transformers folder has behind it.

        inputs: texts, which get what the tokenizer puts around them, or token ids. pooling: "cls", "last", "mean" or
        "auto": what the folder says; else "cls" of an encoder, "last" of a model that writes. normalize: to length 1.
        dimensions: keep so many of the first. Raises UsageError or ToolkitError, also where one input fails.
        """
        self._check_open()
        return self._embedder.vectors(inputs, pooling, normalize, dimensions, self._adapter(adapter_name))

    def classify(
        self, inputs: str | list[str] | list[int] | list[list[int]], adapter_name: str | None = None
    ) -> list[dict[str, float]]:
        """How likely each label of a classifier (…ForSequenceClassification) is, of each input: {label: probability}.
        Of a model with one label it is the score. inputs: as for ``get_embeddings``. Raises UsageError for a model
        without a classifier, and what ``get_embeddings`` raises."""
        self._check_open()
        head, states = self._embedder.judged(inputs, self._adapter(adapter_name), rewards=False)
        return [dict(zip(head.labels, head.probabilities(x).tolist(), strict=True)) for x in states]

    def get_reward_score(self, input_ids: list[int] | list[list[int]]) -> list[float]:
        """The reward of each sequence of token ids, of a reward model (…ForRewardModel), or of a classifier that has
        one label. The token by which InternLM2's judge is added where it is missing. Raises UsageError for another
        model, and what ``get_embeddings`` raises."""
        self._check_open()
        many = arguments.id_rows(input_ids, self.tokenizer.vocab_size)
        head, states = self._embedder.judged(many, self._adapter(None), rewards=True)
        return [float(head.logits(x)[0]) for x in states]

    def batch(
        self,
        source: str | Path | Iterable[Mapping[str, Any]],
        target: str | Path,
        prompt: str | None = None,
        *,
        overwrite: bool = False,
        use_tqdm: bool = False,
        limits: Limits | None = None,
        **kwargs: Any,
    ) -> Tally:
        """Answer a file of requests into another, a line of ``target`` for each as it comes, as ``tool batch`` does:
        how many there are and were answered. The same call goes on where it was ended.

        source: JSON lines as OpenAI's batches have them, or with ``prompt`` rows: CSV, Parquet or JSON lines, whose
        columns stand in its braces ("Translate: {text}"); a list or data set of dicts serves as well. overwrite: throw
        away the answers that ``target`` has. use_tqdm shows progress on standard error. limits: those of a server's
        requests. kwargs: ``json_schema`` (a dict, its text, or a file), ``system``, ``endpoint`` and ``id_column`` (see
        ``tool batch --help``), and fields of requests that do not give them (``max_tokens=64, temperature=0``). A line
        that fails says so itself. Raises UsageError where files or arguments do not fit.
        """
        from toolkit.batch import from_python
        from toolkit.serve.http.limits import Limits

        self._check_open()
        how = (self.engine, self.chat_template, self._named_template, self.reader.templates, self.model_path)
        return from_python.answer(
            *how, source, target, prompt, limits or Limits(), kwargs, overwrite=overwrite, show=use_tqdm
        )

    def update_weights(self, weights: Weights, mode: str = "wait") -> None:
        """Go on with other weights of the same model, as of a training step.

        weights: a ``.safetensors`` file, a directory of such, or tensors by name (a dict such as ``state_dict()``, or
        an iterable of pairs): all of the model's, named, shaped and typed as in its checkpoint. They are copied to a
        folder for temporary files, from where ``sleep`` and ``wake`` read them again. mode: what becomes of requests
        that run beside, in other threads: "wait" for their end, "abort" them, or "keep" them going with the new
        weights. What the prefix cache and sessions hold is forgotten. Raises ToolkitError that names the tensor where
        they cannot be used; the old ones stay.
        """
        self._check_open()
        from toolkit.artifacts.weight_files.new_weight_files import WeightFiles

        self.engine.weights.update(WeightFiles.of(weights), mode)

    def close(self) -> None:
        """Stop everything and free the model. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.engine.close()  # ends every request with an error: streams that are still read end too

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _jobs(
        self,
        prompts: list[Prompt],
        gen_config: GenConfigs,
        do_preprocess: bool,
        adapter_name: str | None,
        sessions: list[Session] | None,
        kwargs: dict[str, Any],
    ) -> list[Job]:
        self._check_open()
        adapter_name = self._adapter(adapter_name)
        options = arguments.template_options(kwargs)
        configs = arguments.configs(gen_config or self.gen_config, len(prompts))
        for line in {line for config in configs for line in config.without_effect(self._of_model)} - self._warned:
            self._warned.add(line)
            logger.warning("%s; give do_sample=True too, or leave it out", line)
        return list(jobs_of(self.reader, prompts, configs, sessions, adapter_name, do_preprocess, options))

    def _adapter(self, asked: str | None = None) -> str | None:
        """The one that a call means. Raises UsageError where there is none of that name."""
        name = asked or self.adapter_name
        if name is not None and name not in self.engine.adapters.names:
            known = ", ".join(self.engine.adapters.names) or "none: give the engine config adapters={name: path}"
            raise UsageError(f"adapter_name: expected one of the model's adapters ({known}), found {name!r:.80}")
        return name

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("pipeline: it is closed; make another")


pipeline = Pipeline  # LMDeploy's name of what makes one
