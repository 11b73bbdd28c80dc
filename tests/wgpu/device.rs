//! The device under test.

use std::{panic::catch_unwind, sync::OnceLock, time::Duration};

use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Spread};
use burn_wgpu::{RuntimeOptions, Wgpu, WgpuDevice, graphics::Vulkan, init_setup};

pub(crate) type B = Replica<Wgpu>;

/// The CPU as a Vulkan device, started once.
///
/// # Panics
///
/// If there is none, with what to install.
pub(crate) fn lavapipe() -> WgpuDevice {
    static STARTED: OnceLock<bool> = OnceLock::new();
    let start = || catch_unwind(|| init_setup::<Vulkan>(&WgpuDevice::Cpu, RuntimeOptions::default())).is_ok();
    assert!(
        *STARTED.get_or_init(start),
        "no Vulkan device runs on the CPU: install Mesa's lavapipe, `apt-get install mesa-vulkan-drivers libvulkan1`"
    );
    WgpuDevice::Cpu
}

/// Members that share one device; small operations are shared out, too.
pub(crate) fn replica(num_members: usize) -> ReplicaDevice<Wgpu> {
    let options = ReplicaOptions {
        spread: Spread::OnHeavyOp { min_work: 1 },
        // Shaders are compiled when they are first used.
        timeout: Duration::from_secs(300),
        ..Default::default()
    };
    ReplicaDevice::with_options(vec![lavapipe(); num_members], options).unwrap()
}
