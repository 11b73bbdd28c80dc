//! Data-parallel training, with threads as ranks, against one device.

mod buffers;
mod clip;
mod data;
mod data_loader;
mod hooks;
mod learner;
mod models;
mod overlap;
mod parameters;
mod random;
mod statistics;
mod statistics_replica;
mod step;
mod step_faults;
mod step_parity;
mod step_replica;
