//! Models as users write them, in any size: small ones are trained by the tests, large ones by the benches.

#![allow(missing_docs, reason = "the derive of `Module` makes records without them")]

pub mod generative;
pub mod images;
pub mod sequences;
pub mod text;
