//! What planning one op costs, beside the floor: two vectors of one placement each.
//!
//! `cargo bench -p bonfire-placement`

use std::hint::black_box;
use std::time::Instant;

use bonfire_placement::{Op, Operand, Placement, Reduction, Role, Shares, Yield};

fn main() {
    let (rows, cols) = (Placement::shard(0, [8; 8]), Placement::shard(1, [8; 8]));
    let channels = Placement::shard(1, [2; 8]);
    let (whole, local) = (Placement::Replicate, Placement::Local);
    let image: &[usize] = &[64, 16, 8, 8];
    let split_whole =
        || Op::Batched { dims: vec![0], roles: vec![Role::Split, Role::Whole], outputs: vec![Yield::Split] };

    let add = || Op::Aligned { blocked: Vec::new(), num_outputs: 1 };
    let softmax = || Op::Aligned { blocked: vec![1], num_outputs: 1 };
    let reshape = || Op::Reshape { to: vec![64, 1024] };
    let permute = || Op::Permute { axes: vec![1, 0, 2, 3] };
    let sum = || Op::Reduce { dim: 0, reduction: Reduction::Sum };

    let floor = nanoseconds(|| {
        black_box((vec![black_box(&rows).clone()], vec![black_box(&rows).clone()]));
    });
    println!("{:<32} {floor:>6.0} ns", "floor");
    let time = |name: &str, op: &dyn Fn() -> Op, operands: &[(&Placement, &[usize])]| {
        let operands: Vec<Operand<'_>> =
            operands.iter().map(|&(placement, shape)| Operand { placement, shape }).collect();
        // Making the op is part of it: its lists are vectors.
        let per_plan = nanoseconds(|| {
            black_box(op().plan(black_box(&operands), &Shares::Equal, 8)).expect("a plan");
        });
        println!("{name:<32} {per_plan:>6.0} ns {:>6.1} floors", per_plan / floor);
    };
    time("add, both sharded", &add, &[(&rows, image), (&rows, image)]);
    time("add, one local", &add, &[(&rows, image), (&local, image)]);
    time("add, all-to-all", &add, &[(&rows, image), (&channels, image)]);
    time("softmax", &softmax, &[(&rows, &[64, 10])]);
    time("reshape", &reshape, &[(&rows, image)]);
    time("permute", &permute, &[(&rows, image)]);
    time("sum over the batch", &sum, &[(&rows, image)]);
    time("matmul, rows", &|| Op::Matmul, &[(&rows, &[64, 32]), (&whole, &[32, 10])]);
    time("matmul, k", &|| Op::Matmul, &[(&cols, &[32, 64]), (&rows, &[64, 10])]);
    time("matmul, local", &|| Op::Matmul, &[(&local, &[64, 32]), (&local, &[32, 10])]);
    time("conv", &split_whole, &[(&rows, image), (&whole, &[32, 16, 3, 3])]);
    time("conv, local", &split_whole, &[(&local, image), (&local, &[32, 16, 3, 3])]);
}

/// The best of a few runs: what it costs when nothing else runs.
fn nanoseconds(mut work: impl FnMut()) -> f64 {
    let num_rounds = 20_000;
    let mut run = || {
        let start = Instant::now();
        (0..num_rounds).for_each(|_| work());
        start.elapsed().as_nanos() as f64 / f64::from(num_rounds)
    };
    (0..9).map(|_| run()).fold(f64::INFINITY, f64::min)
}
