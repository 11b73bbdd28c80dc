//! Replicas of WGPU devices: training beside Flex, and what goes from one thread to another on one device.
//!
//! They run on Mesa's lavapipe, a Vulkan device that needs no GPU.

mod device;
mod models;
mod threads;
mod training;
