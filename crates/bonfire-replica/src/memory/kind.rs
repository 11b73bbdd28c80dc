//! What a tensor is used for, told from what the program does with it. Pure.

/// In the order of [`BytesByKind`](super::BytesByKind)'s fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MemoryKind {
    Parameters,
    Gradients,
    OptimizerState,
    Activations,
    Other,
}

impl MemoryKind {
    pub(crate) const COUNT: usize = 5;
    pub(super) const ALL: [Self; Self::COUNT] =
        [Self::Parameters, Self::Gradients, Self::OptimizerState, Self::Activations, Self::Other];
    /// Under which a buffer is counted that is held as several kinds: a parameter's view may be anything.
    pub(super) const BY_RANK: [Self; Self::COUNT] =
        [Self::Parameters, Self::OptimizerState, Self::Gradients, Self::Activations, Self::Other];

    /// The kind whose number this is.
    pub(crate) fn of_index(index: u8) -> Self {
        Self::ALL[usize::from(index)]
    }

    /// Whether a product that uses it beside what the members share makes a parameter of it: gradients and statistics
    /// stay what they are.
    pub(crate) fn may_be_parameter(self) -> bool {
        matches!(self, Self::Other | Self::OptimizerState)
    }

    /// Whether it came out of a backward pass.
    fn is_of_training(self) -> bool {
        matches!(self, Self::Gradients | Self::OptimizerState)
    }
}

/// An input, as the kinds see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) kind: MemoryKind,
    /// A sum in parts that stays one.
    pub(crate) is_sum: bool,
    /// Whether the operation has its last handle.
    pub(crate) is_last: bool,
}

/// What an operation does to the elements of its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Shows those of its one input in another shape or order.
    View,
    /// The first input less the second.
    Difference,
    /// Another one that is elementwise.
    Elementwise,
    Other,
}

/// The kind of a result that every member holds whole.
pub(crate) fn of_whole(step: Step, operands: &[Operand]) -> MemoryKind {
    let is_kept = |operand: &Operand| operand.kind == MemoryKind::Parameters && operand.is_last;
    let is_elementwise = matches!(step, Step::Elementwise | Step::Difference);
    match operands {
        [input] if step == Step::View => input.kind,
        // A step of an optimizer, whose parameter nobody may have used in a product yet.
        [tensor, delta] if step == Step::Difference && delta.kind.is_of_training() && is_trained(tensor.kind) => {
            MemoryKind::Parameters
        }
        _ if is_elementwise && operands.iter().any(is_kept) => MemoryKind::Parameters,
        _ if operands.iter().any(|operand| operand.kind.is_of_training()) => MemoryKind::OptimizerState,
        [_, ..] if operands.iter().all(|operand| operand.kind == MemoryKind::Activations) => MemoryKind::Activations,
        _ => MemoryKind::Other,
    }
}

fn is_trained(kind: MemoryKind) -> bool {
    matches!(kind, MemoryKind::Parameters | MemoryKind::Other)
}

/// The kind of a result that is a sum in parts.
pub(crate) fn of_sum(is_reduction: bool, operands: &[Operand]) -> MemoryKind {
    let mut sums = operands.iter().filter(|operand| operand.is_sum).map(|operand| operand.kind).peekable();
    let is_statistic = match sums.peek() {
        Some(_) => sums.all(|kind| kind == MemoryKind::Activations),
        None => is_reduction,
    };
    if is_statistic { MemoryKind::Activations } else { MemoryKind::Gradients }
}

#[cfg(test)]
mod tests {
    use super::{
        MemoryKind::{Activations, Gradients, OptimizerState, Other, Parameters},
        *,
    };

    fn kept(kind: MemoryKind) -> Operand {
        Operand { kind, is_sum: false, is_last: false }
    }

    fn last(kind: MemoryKind) -> Operand {
        Operand { is_last: true, ..kept(kind) }
    }

    fn sum(kind: MemoryKind) -> Operand {
        Operand { is_sum: true, ..kept(kind) }
    }

    #[test]
    fn the_steps_of_optimizers_keep_their_kinds() {
        let table = [
            // SGD: p - grad * lr.
            (Step::Elementwise, vec![last(Gradients)], OptimizerState),
            (Step::Difference, vec![last(Parameters), last(OptimizerState)], Parameters),
            // A parameter that no product has used yet, as a scale of a normalisation.
            (Step::Difference, vec![last(Other), last(OptimizerState)], Parameters),
            // Momentum: m * factor + grad.
            (Step::Elementwise, vec![last(OptimizerState)], OptimizerState),
            (Step::Elementwise, vec![last(OptimizerState), kept(Gradients)], OptimizerState),
            (Step::Difference, vec![last(OptimizerState), kept(Gradients)], OptimizerState),
            // AdamW's decay of a parameter that is still held, then its step.
            (Step::Elementwise, vec![kept(Parameters)], Other),
            (Step::Difference, vec![last(Other), last(OptimizerState)], Parameters),
            // Weight decay: grad + p * penalty.
            (Step::Elementwise, vec![last(Other), last(Gradients)], OptimizerState),
            // A parameter that is clamped.
            (Step::Elementwise, vec![last(Parameters)], Parameters),
            // Norms to clip by.
            (Step::Other, vec![kept(Gradients)], OptimizerState),
        ];
        for (step, operands, expected) in table {
            assert_eq!(of_whole(step, &operands), expected, "{step:?} of {operands:?}");
        }
    }

    #[test]
    fn whole_results_of_other_things_are_statistics_or_other() {
        assert_eq!(of_whole(Step::Elementwise, &[kept(Activations)]), Activations);
        assert_eq!(of_whole(Step::Elementwise, &[last(Other), kept(Activations)]), Other);
        assert_eq!(of_whole(Step::Other, &[]), Other);
        assert_eq!(of_whole(Step::Other, &[last(Parameters)]), Other);
    }

    #[test]
    fn a_view_is_of_the_kind_of_what_it_shows() {
        for kind in MemoryKind::ALL {
            assert_eq!(of_whole(Step::View, &[kept(kind)]), kind);
            assert_eq!(MemoryKind::of_index(kind as u8), kind);
        }
    }

    #[test]
    fn sums_are_gradients_unless_they_are_statistics_or_made_of_such_alone() {
        assert_eq!(of_sum(false, &[kept(Activations), kept(Activations)]), Gradients);
        assert_eq!(of_sum(true, &[kept(Activations)]), Activations);
        assert_eq!(of_sum(false, &[sum(Activations), kept(Other)]), Activations);
        assert_eq!(of_sum(false, &[sum(Activations), sum(Gradients)]), Gradients);
        // A gradient that is summed once more, over a dim that was broadcast.
        assert_eq!(of_sum(true, &[sum(Gradients)]), Gradients);
    }
}
