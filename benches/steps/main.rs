//! Training steps on a replica against the same steps without one, interleaved in one run.
//!
//! `cargo xtask bench steps` prints a JSON line per figure. A round measures every contender once, one after the other,
//! and does not count if the host took more than 5 % of the CPU time. A figure is the median of the rounds' ratios; its
//! goal is met if it lies on the good side of the 95 % interval of that median, or inside.

#![allow(unreachable_pub)]

mod contenders;
mod models;
mod rounds;

use contenders::{Contender, controller, free_threads, plain, replica};
use models::{Cnn, Mlp, Tiny};
use rounds::{Goal, Rounds};

/// `cargo bench --bench steps -- tiny` measures only the figures whose group has that word: cnn, mlp, tiny, controller.
fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |group: &str| wanted.is_empty() || wanted.iter().any(|word| group.contains(word.as_str()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if is_wanted("cnn") {
        for batch_size in [64, 256] {
            compare::<Cnn<_>, Cnn<_>>(&format!("CNN, batch {batch_size}"), batch_size, cores, 0.92);
        }
    }
    if is_wanted("mlp") {
        compare::<Mlp<_>, Mlp<_>>("MLP, batch 256", 256, cores, 0.85);
    }
    if is_wanted("tiny") {
        let rounds = Rounds::measure(vec![plain::<Tiny<_>>(4, 1, 200), replica::<Tiny<_>>(4, 2, 1, 200)]);
        rounds.report("tiny MLP, batch 4: time on 2 members over plain", 1, 0, Goal::AtMost(1.1));
    }
    if is_wanted("controller") {
        let rounds = Rounds::measure(vec![controller(2)]);
        rounds.report_micros("controller, per operation and member", 0, Goal::AtMost(2.0));
    }
}

/// One model at one batch size; `P` and `R` are the model on the plain backend and on a replica.
fn compare<P: models::Classifier<contenders::Plain>, R: models::Classifier<contenders::Replicated>>(
    name: &str,
    batch_size: usize,
    cores: usize,
    free_goal: f64,
) {
    let contenders: Vec<Contender> = vec![
        plain::<P>(batch_size, 1, 1),
        plain::<P>(batch_size, cores, 1),
        free_threads::<P>(batch_size, 2, 1),
        replica::<R>(batch_size, 1, cores, 1),
        replica::<R>(batch_size, 2, 1, 1),
    ];
    let rounds = Rounds::measure(contenders);
    // The step time's ratio; and, the other way round, that of items per second.
    let one_member = if batch_size == 256 && name.starts_with("CNN") { Goal::None } else { Goal::AtMost(1.05) };
    rounds.report(&format!("{name}: time on 1 member over plain, all cores"), 3, 1, one_member);
    rounds.report(&format!("{name}: rate on 2 members over two free threads"), 2, 4, Goal::AtLeast(free_goal));
    rounds.report(&format!("{name}: rate on 2 members over plain, 1 thread"), 0, 4, Goal::None);
    rounds.report(&format!("{name}: rate on 2 members over plain, all cores"), 1, 4, Goal::None);
}
