//! Deep Q-learning: a target network, values picked by the actions taken, actions chosen from one state.

use burn::{
    module::Module,
    nn::{
        Linear, LinearConfig, Relu,
        loss::{HuberLossConfig, Reduction},
    },
    optim::{AdamConfig, GradientsParams, Optimizer},
    tensor::{
        Int, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::{floats, ints},
    journal::{Journal, NUM_STEPS, Program},
    parity::{Expected, equals_one_device},
};

#[derive(Module, Debug)]
struct QNetwork<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

const NUM_FEATURES: usize = 4;
const NUM_ACTIONS: u64 = 3;

impl<B: Backend> QNetwork<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(NUM_FEATURES, 16).init(device),
            output: LinearConfig::new(16, NUM_ACTIONS as usize).init(device),
            relu: Relu::new(),
        }
    }

    fn forward(&self, states: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output.forward(self.relu.forward(self.hidden.forward(states)))
    }

    /// All actions, the best first.
    fn rank_actions(&self, state: Tensor<B, 2>) -> Tensor<B, 2, Int> {
        self.forward(state).argsort_descending(1)
    }
}

struct TrainDqn;

impl Program for TrainDqn {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut online = QNetwork::<B>::new(device);
        let mut target = online.clone();
        let mut optimizer = AdamConfig::new().init();
        for step in 0..NUM_STEPS {
            if step % 4 == 0 {
                target = online.clone();
            }
            // The agent looks at one state; the batch is from its memory.
            let state = floats::<B, 2>(step + 50, [1, NUM_FEATURES], device);
            journal.exact(online.rank_actions(state).into_data());

            let states = floats::<B, 2>(step, [8, NUM_FEATURES], device);
            let next_states = floats::<B, 2>(step + 1, [8, NUM_FEATURES], device);
            let rewards = floats::<B, 2>(step + 2, [8, 1], device);
            let goes_on = ints::<B, 2>(step, [8, 1], 2, device).float();
            let actions = ints::<B, 2>(step + 3, [8, 1], NUM_ACTIONS, device);

            let expected = rewards + target.forward(next_states).max_dim(1).detach() * goes_on * 0.9;
            let values = online.forward(states).gather(1, actions);
            let loss = HuberLossConfig::new(0.5).init().forward(values, expected, Reduction::Mean);
            let grads = GradientsParams::from_grads(loss.backward(), &online);
            online = optimizer.step(1e-3, online, grads);
            journal.step([loss]);
        }
        journal.finish_optimizer::<B, QNetwork<B>, _>(&optimizer, device);
        journal.finish::<B, _, 2>(&online, |model| model.forward(floats(99, [6, NUM_FEATURES], device)));
        journal.finish::<B, _, 2>(&target, |model| model.forward(floats(99, [6, NUM_FEATURES], device)));
    }
}

#[test]
fn a_deep_q_network_trains_as_on_one_device() {
    equals_one_device::<TrainDqn>(Expected::new(1));
}
