//! Steps that are taken back.

use pykv_core::scheduler::Plan;

use crate::support::Engine;

impl Engine {
    /// Takes steps back, the newest first: whatever they wrote is worth nothing. What came before them runs.
    pub(crate) fn discard(&mut self, plan: Plan) {
        while let Some(older) =
            self.queue.iter().find(|queued| queued.plan.id < plan.id && queued.samples.is_none())
        {
            self.compute(older.plan);
        }
        while let Some(newest) = self.queue.back().filter(|queued| queued.plan.id >= plan.id) {
            let place = self.queue.len() - 1;
            let plan = newest.plan;
            (0..plan.num_batch_rows).for_each(|row| self.spoil(place, row));
            self.spoil_states(plan, 0..plan.num_batch_rows);
            self.queue.pop_back();
        }
        self.scheduler.discard(plan.id).unwrap();
        self.scheduler.check().unwrap();
        // Steps are numbered on: so are the sides that they are written to.
        if let Some(queued) = self.queue.back() {
            self.num_plans = queued.side + 1;
        }
    }
}
