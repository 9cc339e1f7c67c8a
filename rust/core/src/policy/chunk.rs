//! How much of a prompt is computed in one step.

/// Tokens of a sequence that the step computes: all that are left, or what the step's budget still allows.
pub fn chunk(num_uncomputed: usize, budget: usize) -> usize {
    num_uncomputed.min(budget)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::chunk;

    #[test]
    fn a_chunk_ends_where_the_prompt_or_the_budget_ends() {
        assert_eq!((chunk(5, 8), chunk(9, 8), chunk(9, 0)), (5, 8, 0));
    }
}
