// The events of a streamed reply, as /v1/chat/completions sends them.

// Yields {data} for each event and {note} for each comment. The server writes whole lines, the network does not.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield { data: line.slice(5).trim() };
      else if (line.startsWith(":")) yield { note: line.slice(1).trim() };
    }
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status} ${response.statusText}`;
  }
}

// Sends a request and calls take(delta, finish), note(text) and usage(counts) as the reply comes. Throws an Error with
// the server's words if it refuses or fails, AbortError if the signal ends it.
export async function ask(request, key, signal, { take, note, usage }) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await problem(response));
  let ended = false;
  for await (const event of events(response.body)) {
    if (event.note !== undefined) note(event.note);
    else if (event.data === "[DONE]") ended = true;
    else {
      const data = JSON.parse(event.data);
      if (data.error) throw new Error(data.error.message);
      for (const choice of data.choices) take(choice.delta, choice.finish_reason);
      if (data.usage) usage(data.usage);
    }
  }
  if (!ended) throw new Error("the connection to the server was lost");
}

export async function models(key) {
  const response = await fetch("v1/models", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (!response.ok) throw new Error(await problem(response));
  return (await response.json()).data.map((model) => model.id);
}
