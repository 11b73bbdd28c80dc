//! The families that methods fall into, each with the reason for what it does to a shard.

use super::case::Rule;

const fn rule(name: &'static str, why: &'static str) -> Rule {
    Rule { name, why }
}

pub const NO_INPUT: Rule = rule("makes a tensor", "it has no tensor to follow: drawn, read in or filled at home");
pub const READ: Rule = rule("reads", "parts are read one by one and joined on the host");
pub const ANSWER: Rule = rule("answers", "it asks nothing of the members");
pub const HANDLE: Rule = rule("hands on", "the tensor itself");
pub const ELEMENTWISE: Rule = rule("elementwise", "an element needs only those at its own place");
pub const SUM: Rule = rule("elementwise, linear", "as elementwise; sums in parts stay so");
pub const VIEW: Rule = rule(
    "moves",
    "a dim keeps its rows where they go together; else the members exchange them for rows of a dim that does, and only \
     where there is none all of them hold the whole",
);
pub const ALONG: Rule = rule(
    "along a dim",
    "the dim that it works along must be whole: the members exchange its rows for those of another, or, without another, \
     all of them run it whole",
);
pub const ADDS_UP: Rule = rule("reduction", "parts of the reduced dim combine; other dims keep theirs");
pub const TAKES_ALL: Rule = rule(
    "reduction of the whole",
    "results of parts do not combine (the place of the largest), or only in another order of rounding than one device has \
     (a product; no trainer was seen to wait for one): along a dim the members share another dim, and of everything all \
     of them see everything",
);
pub const INDEXED: Rule = rule(
    "indexed",
    "indices point anywhere into the dim, which must be whole: the members exchange its rows for those of another; dims \
     beside it keep their rows, and so do indices of a whole tensor; members add to zeros each for itself, and the sum \
     stays in parts",
);
pub const MATMUL: Rule = rule("matmul", "rows, columns and batches are apart; parts of the inner dim add up");
pub const BATCH: Rule =
    rule("batch", "items are apart, and so are channels where no weight joins them; weights must be whole");
pub const GRADIENT: Rule = rule("gradient of a weight", "each item adds to it");
pub const ADDS_UP_LATER: Rule = rule(
    "reduction, then a division",
    "the members' sums are divided once they are formed; of integers too narrow for that all members see everything",
);
pub const HOST: Rule =
    rule("by the host", "the data decides the shape of the result: it is read, and made anew at home");
pub const QUANTIZED: Rule = rule("whole", "scales belong to the whole tensor: never shared out");
pub const DECOMPOSED: Rule = rule("of other methods", "what is said of the quantized tensor's float form");
