#![doc = include_str!("../README.md")]
//!
//! # Feature flags
//!
//! - `distributed`: [`Replica`] is a `DistributedBackend`, as `Autodiff` demands where Burn's feature of this name is on.
//! - `ir`: [`Replica`] is a `BackendIr`: a server can offer it to another process, a router can hold it.
//! - `mpi`: ranks that mpirun has started talk over MPI; needs an MPI library and libclang to build.
//! - `ndarray`: `burn-ndarray` devices as members.
//! - `serde`: [`ReplicaOptions`], [`ShareSchedule`], [`RandomState`], [`MemoryReport`] and options of `collectives` can be read and written.
//! - `train` (on by default): the module [`train`], data-parallel training across ranks; it brings `burn-train`.
//! - `wgpu`: WGPU devices as members, without Burn's fusion.

#![forbid(unsafe_code)]

pub use bonfire_collectives as collectives;
pub use bonfire_placement as placement;
pub use bonfire_replica::*;
#[cfg(feature = "train")]
pub use bonfire_train as train;
