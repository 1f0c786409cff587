interface Listeners {
  readonly all: Set<() => void>;
  readonly tell: () => void;
}

const listening = new WeakMap<AbortSignal, Listeners>();

/**
 * Calls `listener` when the signal is aborted. Of all that listen to a signal it has one listener: a server may have one signal for
 * all of its requests, and Node warns of more than ten.
 * @returns stops listening
 */
export function whenAborted(signal: AbortSignal | undefined, listener: () => void): () => void {
  if (signal === undefined) return () => undefined;
  const { all, tell } = listening.get(signal) ?? listen(signal);
  all.add(listener);
  return () => {
    all.delete(listener);
    if (all.size > 0 || listening.get(signal)?.all !== all) return;
    listening.delete(signal);
    signal.removeEventListener('abort', tell);
  };
}

function listen(signal: AbortSignal): Listeners {
  const all = new Set<() => void>();
  const tell = (): void => {
    for (const listener of [...all]) listener();
  };
  signal.addEventListener('abort', tell, { once: true });
  const listeners = { all, tell };
  listening.set(signal, listeners);
  return listeners;
}
