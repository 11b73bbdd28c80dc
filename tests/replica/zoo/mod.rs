//! Models as users write them, each trained by a program that is written once and run on a plain backend and on members.
//!
//! `journal.rs` is what such a program writes down, `parity.rs` compares what it wrote; the other files are the zoo.

mod checkpoints;
mod data;
mod generative;
mod images;
mod journal;
mod numerics;
mod optimizers;
mod parity;
mod reinforcement;
mod sequences;

pub mod text;
