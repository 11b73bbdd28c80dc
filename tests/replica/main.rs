//! `Replica<B>` against the plain backend: what users would notice if it were wrong.

#![allow(unreachable_pub)]

mod cases;
mod equality;
mod faults;
mod ir;
mod memory;
mod models;
mod operations;
mod placements;
mod probe;
mod probe_tests;
mod programs;
mod random;
mod random_programs;
mod runs;
mod shares;
mod soak;
mod steps;
mod surface;
mod threads;
mod zoo;
