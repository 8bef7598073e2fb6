"""Which names mean which operation, in torch, jax, numpy, mlx, triton and pallas alike."""

import re

PRODUCTS = {
    **dict.fromkeys(("matmul", "mm", "bmm", "dot", "inner", "tensordot", "dot_general", "ragged_dot", "mma"), 0),
    **dict.fromkeys(
        ("linear", "dot_scaled", "batch_matmul", "gemm", "einsum", "contract", "scaled_mm", "_scaled_mm"), 0
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), 1),
}
"""Matrix products, and at which argument the operands begin; a method counts its receiver as the first argument."""

PRODUCTS_IN_PLACE = {"addmm_", "baddbmm_", "addbmm_"}
PRODUCT_WORDS = re.compile(r"(?:^|_)(?:gemm|matmul|mm|linear)(?:_|\d|$)", re.IGNORECASE)
"""Functions of the target whose insides say nothing: with two operands and logits behind, their name is believed."""

CROSS_ENTROPY_WORDS = re.compile(r"^(?!.*(?:linear|head|hidden)).*(?:cross_?entropy|softmax_xent)", re.IGNORECASE)
"""Functions of the target whose insides show no loss: with a product's logits and ids, their name is believed."""

HEAD_WORDS = re.compile(
    r"(?:^|[._])(?:lm_?head|head|unembed\w*|embed_out|output_layer|output_projection|attend|as_linear"
    r"|compute_(?:\w+_)?logits|logits_from_hidden\w*|hidden_to_logits)$|embed\w*\.decode$"
)
"""A module that is called: with hidden states in and logits out, its name is believed."""

LINEAR_LAYERS = {"Linear", "Dense", "DenseGeneral", "Einsum", "LinearBase", "ColumnParallelLinear", "ParallelLMHead"}

EXPONENTIALS = {"exp", "exp2", "exp_", "ex2"}
LOGARITHMS = {"log", "log2", "log1p", "log_", "lg2"}
SOFTMAXES = {"softmax": "softmax", "log_softmax": "log_softmax", "logsumexp": "lse", "LogSoftmax": "log_softmax"}
PAIR_SOFTMAXES = {"logaddexp"}

CROSS_ENTROPIES = {
    "cross_entropy",
    "nll_loss",
    "softmax_cross_entropy_with_integer_labels",
    "softmax_cross_entropy",
    "sparse_softmax_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits",
    "poly_loss_cross_entropy",
}
CROSS_ENTROPY_LAYERS = {"CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "KLDivLoss": "kl_div"}
DIVERGENCES = {"kl_div", "kl_divergence", "kl_divergence_with_log_targets", "convex_kl_divergence"}
CATEGORICALS = {"Categorical", "OneHotCategorical"}
PREFERENCES = {"logsigmoid", "log_sigmoid", "sigmoid", "softplus", "relu", "square", "pow", "abs", "clamp", "clip"}

PICKS = {"gather", "take_along_axis", "take_along_dim", "index_select", "take", "select_along_axis", "batch_gather"}
EMBEDDINGS = {"embedding", "embedding_lookup"}
ONE_HOT = {"one_hot"}
CHOICES = {
    *("argmax", "argmin", "topk", "top_k", "argsort", "sort", "multinomial", "categorical", "sample", "approx_max_k"),
    *("argpartition", "searchsorted", "randint", "randperm", "nonzero", "argwhere", "permutation", "choice"),
}
POSITIONS = {"arange", "iota", "broadcasted_iota", "linspace", "lax_iota"}
FRESH = {
    *("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like", "rand", "randn", "eye"),
    *(
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "normal",
        "uniform",
        "rand_like",
        "randn_like",
        "empty_strided",
    ),
    *("program_id", "num_programs", "cdiv", "next_power_of_2", "device_count", "is_tensor", "isinstance", "hasattr"),
    *("len", "numel", "stride", "dim", "element_size", "get_device", "data_ptr", "is_contiguous", "finfo", "iinfo"),
    *("print", "warn", "size", "issubclass", "is_available", "ndimension", "warn_once", "info", "debug", "warning"),
}
"""What gives sizes, positions or memory: nothing of the numbers of its arguments."""

PLACE_WORDS = re.compile(
    r"(?:seq_?len|_lens?\b|^lens?\b|offset|indptr|chunk_ind|block_(?:ind|table)|page|slot_map|position|pos_ids)",
    re.IGNORECASE,
)
"""What says where something lies: an index by these alone chooses no class."""

WHOLE_MODELS = re.compile(r"(?:^|[._])(?:\w*model|backbone|network|net|policy|actor|transformer|encoder|decoder)$")
"""What they make of one batch of several is no piece of one array."""

SIZES = {
    *("shape", "device", "dtype", "ndim", "size", "is_cuda", "requires_grad", "type", "layout", "itemsize", "nbytes"),
    *("sharding", "weak_type", "is_contiguous", "element_ty", "in_features", "out_features", "vocab_size", "training"),
}

SAME_ITEMS = {"list", "tuple", "sorted", "iter", "reversed", "set", "tqdm", "trange"}
VIEWS = {
    *("view", "reshape", "contiguous", "flatten", "squeeze", "unsqueeze", "t", "transpose", "permute", "narrow", "T"),
    *("expand", "chunk", "split", "tensor_split", "unbind", "detach", "array_split", "ravel", "mT", "swapaxes", "at"),
    *("expand_dims", "expand_as", "view_as", "data", "unflatten", "swapdims", "advance", "select"),
}

MAPS = {"map"}
SCANS = {"scan", "associative_scan"}
COUNTED_LOOPS = {"fori_loop"}
OPEN_LOOPS = {"while_loop"}
CHECKPOINTS = {"checkpoint", "remat", "checkpoint_sequential", "CheckpointFunction", "checkpoint_wrapper"}
GRADIENTS = {"grad", "value_and_grad", "grad_and_value", "vjp", "filter_value_and_grad", "filter_grad", "linearize"}
OWN_LANGUAGES = {"cute": "CuTe", "cutlass": "CuTe", "ct": "cuTile", "tile": "cuTile", "tilelang": "TileLang"}
"""Kernel languages whose copies between memories are not followed."""

KERNEL_MAKERS = {
    "jit": ("triton",),
    "kernel": ("cute", "helion", "ct", "cutile", "tile"),
    "prim_func": ("T", "tilelang"),
}
PALLAS_CALLS = {"pallas_call", "core_map", "emit_pipeline"}
CUSTOM_GRADIENTS = {"custom_vjp", "custom_jvp", "custom_gradient"}

LOADS = {"load", "load_tensor", "load_block"}
STORES = {"store", "atomic_add", "atomic_max", "atomic_xchg", "atomic_cas", "store_tensor", "copy"}
POINTERS = {"make_block_ptr", "make_tensor_descriptor", "_experimental_make_tensor_descriptor", "advance"}

LOSS_WORDS = re.compile(
    r"(?:cross_?entropy|(?:^|_)ce(?:_|$)|nll|loss|log_?prob|logps|log_?softmax|grpo|ppo|dpo|orpo|kto|simpo|cpo|jsd|kl_div|distill)",
    re.IGNORECASE,
)
POLICY_WORDS = re.compile(
    r"(?:loss|grpo|ppo|dpo|orpo|kto|simpo|cpo|policy|objective|surrogate|gspo|dapo|cispo|reinforce|actor|preference)",
    re.IGNORECASE,
)
OBJECTIVE_WORDS = re.compile(
    r"(?:loss|grpo|ppo|dpo|orpo|kto|simpo|cpo|ipo|gspo|objective|surrogate|reinforce)", re.IGNORECASE
)
BESIDE_WORDS = re.compile(
    r"(?:metric|stat|advantage|reward|mask|backward|bwd|rollout_corr|clipping|penalty|log_)", re.IGNORECASE
)
"""What is computed beside a loss, of log-probs too."""

BACKWARD_WORDS = re.compile(r"(?<!forward)(?<!and)(?:^|_)(?:bwd|backward)(?:_|$)|(?<=[a-z])Backward$")
"""Functions that are a part of a gradient."""

LOGPROB_WORDS = re.compile(r"(?:log_?probs?|log_?ps?|logprobs?)(?:_|$|\d)", re.IGNORECASE)
ADVANTAGE_WORDS = re.compile(r"(?:advantage|(?:^|_)adv|reward|return|chosen|rejected|delta|coef)", re.IGNORECASE)
LOGITS_WORDS = re.compile(r"(?:^|_)logits(?:_ptr|_chunk|_flat)?$", re.IGNORECASE)

SEED_WORDS = re.compile(
    r"(?:log_?softmax|logsumexp|logaddexp|cross_?entropy|nll_?loss|kl_?div|log_?sigmoid|Categorical|log_?probs?\b)",
    re.IGNORECASE,
)
PAIR_OF_WORDS = re.compile(r"\b(?:exp2?|exp_|softmax)\b"), re.compile(r"\b(?:log2?|log1p|log_|softplus)\b")


def may_hold_a_loss(text: str) -> bool:
    """A file, or the names in a function, without these words holds no loss of its own."""
    return SEED_WORDS.search(text) is not None or all(words.search(text) for words in PAIR_OF_WORDS)


def last(name: str) -> str:
    """The last word of a dotted name."""
    return name.rsplit(".", 1)[-1]


def makes_kernel(dotted: str) -> bool:
    """True for the decorators that turn a function into a kernel: `triton.jit`, `cute.kernel`, ..."""
    parts = dotted.split(".")
    owners = KERNEL_MAKERS.get(parts[-1])
    return owners is not None and any(part in owners for part in parts[:-1])
