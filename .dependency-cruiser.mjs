export default {
  forbidden: [
    {
      name: 'no-circles',
      comment: 'No file refers back to itself through others, not even by types alone.',
      severity: 'error',
      from: {},
      to: { circular: true },
    },
  ],
  // Types count as much as values.
  options: { tsPreCompilationDeps: true, includeOnly: '^packages/[^/]+/src/' },
};
