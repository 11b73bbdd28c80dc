#![doc = include_str!("../README.md")]
//!
//! # Feature flags
//!
//! - `ndarray`: `burn-ndarray` devices as members.
//! - `serde`: [`ReplicaOptions`] and [`RandomState`] can be read and written.

#![forbid(unsafe_code)]

pub use bonfire_collectives as collectives;
pub use bonfire_placement as placement;
pub use bonfire_replica::*;
