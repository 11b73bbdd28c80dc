#![doc = include_str!("../README.md")]
//!
//! # Feature flags
//!
//! - `ir`: [`Replica`] is a `BackendIr`: a server can offer it to another process, a router can hold it.
//! - `ndarray`: `burn-ndarray` devices as members.
//! - `serde`: [`ReplicaOptions`] and [`RandomState`] can be read and written.

#![forbid(unsafe_code)]

pub use bonfire_collectives as collectives;
pub use bonfire_placement as placement;
pub use bonfire_replica::*;
