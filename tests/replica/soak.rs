//! Many steps: what a process holds must not grow. `cargo xtask bench soak` takes a hundred thousand.

use std::{
    fs,
    process::{Command, Stdio},
};

use bonfire::Replica;
use burn::{
    backend::Autodiff,
    nn::LinearConfig,
    optim::{GradientsParams, Optimizer, SgdConfig, momentum::MomentumConfig},
};
use burn_flex::Flex;

use super::runs::{ALWAYS, floats, replica};

type Ad = Autodiff<Replica<Flex>>;

const NUM_STEPS: usize = 6_000;

/// Steps after which a process has all the memory it needs.
const WARM_UP: usize = 2_000;

/// What may be added to it later, in bytes: allocators settle slowly, and 500 bytes lost per step would be more.
const MOST: usize = 2 << 20;

/// Bytes of memory that the process has, where the system tells.
fn resident_bytes() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<usize>().ok()? * 1024)
}

/// In a process of its own, since other tests take memory meanwhile.
#[test]
fn many_steps_leave_memory_flat() {
    let program = std::env::current_exe().unwrap();
    let arguments = ["--ignored", "--exact", "soak::steps_in_a_process_of_their_own", "--nocapture"];
    let run = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    let printed = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{printed}{}", String::from_utf8_lossy(&run.stderr));
    assert!(printed.contains("bytes more after"), "{printed}");
}

#[test]
#[ignore = "run by many_steps_leave_memory_flat"]
fn steps_in_a_process_of_their_own() {
    let device = replica::<Flex>(2, ALWAYS);
    let mut model = LinearConfig::new(3, 2).init::<Ad>(&device);
    let mut optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let (x, target) = (floats::<Ad, 2>(1, [4, 3], &device), floats::<Ad, 2>(2, [4, 2], &device));
    let mut before = None;
    for step in 0..NUM_STEPS {
        if step == WARM_UP {
            before = resident_bytes();
        }
        let loss = (model.forward(x.clone()) - target.clone()).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, grads);
        assert!(step % 100 > 0 || loss.into_scalar().is_finite());
    }
    let before = before.expect("this test reads /proc/self/status");
    let after = resident_bytes().unwrap();
    println!("{} bytes more after {} steps", after.saturating_sub(before), NUM_STEPS - WARM_UP);
    assert!(after <= before + MOST, "{before} bytes after {WARM_UP} steps, {after} after {NUM_STEPS}");
}
