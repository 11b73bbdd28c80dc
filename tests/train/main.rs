//! Data-parallel training, with threads as ranks, against one device.

mod parameters;
mod step;
